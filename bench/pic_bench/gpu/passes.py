"""Requests of `gpu_prefill`, and the passes that compute them: tokens, virtual sequences and a row of slots.

A gap prefill is laid out by the server's own `build_gap_batch`, from a plan and its donors' slots.
"""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from sglang_pic.adapter.serve.gap_batch import Splice, build_gap_batch
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.core import MOST_REUSE, ContentIndex, CoreConfig, Path, Plan, Run, Tokens

SHIFT: Final = 37
"""Donor position less target position."""
_NAMESPACE: Final = "bench"
_HEADER_TOKENS: Final = 64
_QUESTION_TOKENS: Final = 32
_DOCUMENT_TOKENS: Final = 32_000
# Ids that no random text holds: they stand around the donor's text, as the delimiters of a message do.
_OPEN, _CLOSE = 1, 2
_DELIMITERS: Final = frozenset((_OPEN, _CLOSE))


class Extend(NamedTuple):
    """One request's pass, over virtual sequences that share a row of slots."""

    input_ids: Tensor
    """`[num_tokens]` int64, the computed tokens, in order; likewise their positions."""
    positions: Tensor
    row: Tensor
    """`[end]` int64, the slots of the whole prompt."""
    out_slots: Tensor
    """`[num_tokens]` int64, where the KV of the computed tokens goes."""
    prefix_lens: list[int]
    """Per virtual sequence, tokens of the row before its first; `seq_lens` up to and with its last."""
    seq_lens: list[int]
    splice: Splice | None = None
    """Rows to move before the pass."""

    @property
    def is_full(self) -> bool:
        """Whether nothing was computed before."""
        return self.prefix_lens == [0]


def whole_extend(tokens: Tensor, row: Tensor, prefix_len: int) -> Extend:
    """Everything behind an exact prefix, as one sequence: `tokens` and `row` are `[n]` int64 of the whole prompt."""
    positions = torch.arange(prefix_len, len(tokens), device=row.device)
    return Extend(tokens[prefix_len:], positions, row, row[prefix_len:], [prefix_len], [len(tokens)])


def gap_extend(tokens: Tensor, row: Tensor, plan: Plan, donor_row: Tensor) -> Extend:
    """The gaps of a plan as virtual sequences, and the splice of its runs from the slots of their path, `donor_row`."""
    sources = [donor_row[run.donor_start : run.donor_end] for run in plan.runs]
    pending = PendingSplice(plan=plan, slots=sources)
    batch = build_gap_batch([pending], [0], [plan.end], [plan.end], [row], row.device)
    kept = batch.kept
    return Extend(tokens[kept], kept, row, row[kept], batch.prefix_lens, batch.seq_lens, batch.splice)


def random_tokens(rng: np.random.Generator, num_tokens: int, vocab: int) -> Tokens:
    """`num_tokens` ids that repeat nothing."""
    return rng.integers(3, vocab, num_tokens, dtype=np.int32)


def plant(donor: Tokens, num_tokens: int, shift: int, share: float, num_runs: int) -> Plan | None:
    """A plan in which `share` of `num_tokens` lies in `num_runs` equal runs of `donor`, with equal gaps between.

    The first gap covers the sinks; a target position is its donor's less `shift`. None where the planner would make no
    such plan: runs are shorter than its minimum, or gaps than a seam.
    """
    if not num_runs or not share:
        return Plan(prefix_len=0, end=num_tokens)
    run_len = int(num_tokens * share) // num_runs
    num_computed = num_tokens - run_len * num_runs
    first_gap = max(MOST_REUSE.sink_tokens + MOST_REUSE.seam_tokens, num_computed // (num_runs + 1))
    gap_len = (num_computed - first_gap) // num_runs
    if run_len < MOST_REUSE.min_run_tokens or gap_len < MOST_REUSE.seam_tokens:
        return None
    path = Path(_NAMESPACE, [donor])
    starts = [first_gap + number * (run_len + gap_len) for number in range(num_runs)]
    make = partial(Run, donor=path, seam_len=MOST_REUSE.seam_tokens)
    runs = [make(target_start=at, target_end=at + run_len, donor_start=at + shift) for at in starts]
    return Plan(prefix_len=0, end=num_tokens, runs=tuple(runs))


class Lookup(NamedTuple):
    """A request with one run of text, and the index that knows where the text stands."""

    prompt: Tokens
    donor: Tokens
    """The prompt that was computed before."""
    known: ContentIndex

    def plan(self) -> Plan:
        """The server's plan when the request is admitted."""
        return self.known.plan(_NAMESPACE, self.prompt, prefix_len=0, resolve=lambda _path, end: end)

    def publish(self, plan: Plan) -> None:
        """Cut and hash what the plan computes, as the server does when the request is done; into an index of its own,
        for a second time would find everything known."""
        ContentIndex(self.known.config).publish(_NAMESPACE, self.prompt, plan.gaps)


def make_lookup(
    rng: np.random.Generator,
    run_tokens: int,
    vocab: int,
    index_tokens: int,
    *,
    header_tokens: int = _HEADER_TOKENS,
    policy: CoreConfig = MOST_REUSE,
) -> Lookup:
    """A header, `run_tokens` of text that another prompt held as a message behind a longer header, and a question.

    The index also holds `index_tokens` of other documents. Shorter text than the policy's shortest run is one too.
    """
    if run_tokens < policy.min_run_tokens:
        policy = msgspec.structs.replace(policy, min_run_tokens=run_tokens)
    index = ContentIndex(policy)
    for start in range(0, index_tokens, _DOCUMENT_TOKENS):
        document = random_tokens(rng, min(_DOCUMENT_TOKENS, index_tokens - start), vocab)
        index.publish(_NAMESPACE, document, [(0, len(document))])
    text = random_tokens(rng, run_tokens, vocab)
    header, earlier = (random_tokens(rng, num, vocab) for num in (header_tokens, header_tokens + SHIFT - 1))
    question, then = (random_tokens(rng, _QUESTION_TOKENS, vocab) for _ in range(2))
    opened, closed = (np.array([token], dtype=np.int32) for token in (_OPEN, _CLOSE))
    prompt = np.concatenate((header, text, question))
    donor = np.concatenate((earlier, opened, text, closed, then))
    index.publish(_NAMESPACE, donor, [(0, len(donor))], delimiters=_DELIMITERS)
    return Lookup(prompt, donor, index)
