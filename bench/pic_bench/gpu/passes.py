"""Requests of the prefill items, and the ways to compute them with a model and a pool of rows.

A gap prefill is laid out by the server's own `build_gap_batch`, from a plan and its donors' slots.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from pic_bench.gpu.model import Bench, Extend
from sglang_pic.adapter.serve.gap_batch import build_gap_batch
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.core import MOST_REUSE, ContentIndex, CoreConfig, Plan, RowSource, Tokens
from sglang_pic.errors import BenchError

SHIFT: Final = 37  # of the first run: donor position less target position
_NAMESPACE: Final = "bench"
_HEADER_TOKENS: Final = 64
_OTHER_TOKENS: Final = 32
_DOCUMENT_TOKENS: Final = 32_000
# Ids that no random text holds: they stand around the donor's text, as the delimiters of a message do.
_DELIMITERS: Final = (1, 2)


def whole_extend(tokens: Tensor, row: Tensor, prefix_len: int) -> Extend:
    """Everything behind an exact prefix, as one sequence: `tokens` and `row` are `[n]` int64 of the whole prompt."""
    positions = torch.arange(prefix_len, len(tokens), device=row.device)
    return Extend(tokens[prefix_len:], positions, row, row[prefix_len:], [prefix_len], [len(tokens)])


def gap_extend(tokens: Tensor, row: Tensor, plan: Plan, donor_row: Tensor) -> Extend:
    """The gaps of a plan as virtual sequences, and the splice of its runs from the slots of their path, `donor_row`."""
    pending = PendingSplice.on_device(plan, [donor_row[run.donor_start : run.donor_end] for run in plan.runs])
    batch = build_gap_batch([pending], [0], [plan.end], [plan.end], [row], row.device)
    kept = batch.kept
    return Extend(tokens[kept], kept, row, row[kept], batch.prefix_lens, batch.seq_lens, batch.splice)


def random_tokens(rng: np.random.Generator, num_tokens: int, vocab: int) -> Tokens:
    """`num_tokens` ids that repeat nothing."""
    return rng.integers(3, vocab, num_tokens, dtype=np.int32)


class Layout(NamedTuple):
    """A prompt in tokens: a header, then `runs` times a text that another prompt holds and other text behind it."""

    header: int = _HEADER_TOKENS
    run: int = 0
    other: int = _OTHER_TOKENS
    runs: int = 1

    @property
    def num_tokens(self) -> int:
        """The prompt's length."""
        return self.header + self.runs * (self.run + self.other)

    @property
    def num_repeated(self) -> int:
        """Of all runs together."""
        return self.runs * self.run

    @classmethod
    def of_share(cls, num_tokens: int, share: float, runs: int) -> Layout:
        """A prompt of `num_tokens` of which `share` lies in so many equal runs, with equal text between them."""
        run = int(num_tokens * share) // runs
        other = (num_tokens - runs * run) // (runs + 1)
        return cls(num_tokens - runs * (run + other), run, other, runs)


class Lookup(NamedTuple):
    """A request, and the index that knows where the text of its runs stands."""

    prompt: Tokens
    donor: Tokens
    """The prompt that was computed before."""
    known: ContentIndex

    def plan(self) -> Plan:
        """The server's plan when the request is admitted."""
        return self.known.plan(_NAMESPACE, self.prompt, prefix_len=0, rows=RowSource())

    def publish(self, plan: Plan) -> None:
        """Cut and hash what the plan computes, as the server does when the request is done; into an index of its own,
        for a second time would find everything known."""
        ContentIndex(self.known.config).publish(_NAMESPACE, self.prompt, plan.gaps)


def make_lookup(
    rng: np.random.Generator, layout: Layout, vocab: int, index_tokens: int = 0, policy: CoreConfig = MOST_REUSE
) -> Lookup:
    """A prompt, and another one that held its runs as messages behind a longer header and between other text.

    The index also holds `index_tokens` of other documents. Shorter text than the policy's shortest run is one too.
    """
    if 0 < layout.run < policy.min_run_tokens:
        policy = msgspec.structs.replace(policy, min_run_tokens=layout.run)
    index = ContentIndex(policy)
    for start in range(0, index_tokens, _DOCUMENT_TOKENS):
        document = random_tokens(rng, min(_DOCUMENT_TOKENS, index_tokens - start), vocab)
        index.publish(_NAMESPACE, document, [(0, len(document))])
    prompt, donor = ([random_tokens(rng, layout.header + more, vocab)] for more in (0, SHIFT - 1))
    opened, closed = (np.array([token], dtype=np.int32) for token in _DELIMITERS)
    for text in (random_tokens(rng, layout.run, vocab) for _ in range(layout.runs)):
        prompt += [text, random_tokens(rng, layout.other, vocab)]
        donor += [opened, text, closed, random_tokens(rng, layout.other, vocab)]
    known = np.concatenate(donor)
    index.publish(_NAMESPACE, known, [(0, len(known))], delimiters=frozenset(_DELIMITERS))
    return Lookup(np.concatenate(prompt), known, index)


class Request:
    """A prompt on a bench, and the ways to compute it; the prompt that held its runs before is computed."""

    def __init__(self, bench: Bench, layout: Layout, index_tokens: int, policy: CoreConfig = MOST_REUSE) -> None:
        """Draw both prompts and compute the earlier one, into a pool without other rows.

        Raises:
            BenchError: the planner does not find the runs.
        """
        self.lookup = make_lookup(np.random.default_rng(1), layout, bench.dims.vocab, index_tokens, policy)
        self.plan = self.lookup.plan()
        if self.plan.num_spliced < 0.9 * layout.num_repeated:
            raise BenchError(f"{bench.name}, {layout}: the planner splices {self.plan.num_spliced} tokens; not timed.")
        self._bench, self._tokens = bench, bench.to_device(self.lookup.prompt)
        donor = bench.to_device(self.lookup.donor)
        self._donor_row, self._row, _ = bench.slots.tensor_split((len(donor), len(donor) + layout.num_tokens))
        bench.pool.poison()
        bench.first_token(whole_extend(donor, self._donor_row, 0))

    def full(self) -> None:
        """Compute all of it."""
        self._bench.first_token(whole_extend(self._tokens, self._row, 0))

    def gaps(self) -> None:
        """Plan, lay out, splice and compute the rest."""
        self._bench.first_token(gap_extend(self._tokens, self._row, self.lookup.plan(), self._donor_row))

    def prefix(self) -> None:
        """Compute as many tokens as `gaps` does, behind an exact prefix, whose rows an earlier `full` has written."""
        self._bench.first_token(whole_extend(self._tokens, self._row, self.plan.num_spliced))
