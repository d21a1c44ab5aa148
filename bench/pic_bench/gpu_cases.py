"""Owns what `bench-prefill` serves: prompts with planted runs, and a request that the real planner plans on an index.

It must not know models, clocks or devices: tokens are numpy arrays, a plan is the core's own value.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from sglang_pic.core import MOST_REUSE, ContentIndex, Path, Plan, Run, Tokens

__all__ = ["SHIFT", "Lookup", "Planted", "make_lookup", "plant", "random_tokens"]

SHIFT: Final = 37
"""Target position less donor position, negative: a donor stands this much later than its target."""
_NAMESPACE: Final = "bench"
_HEADER_TOKENS: Final = 64
_QUESTION_TOKENS: Final = 32
_DOCUMENT_TOKENS: Final = 32_000


class Planted(NamedTuple):
    """A plan for `[0, end)` with equally long runs, or why there is none."""

    plan: Plan | None
    reason: str


class Lookup(NamedTuple):
    """A request with one run of text, and the index that knows where the text stands."""

    prompt: Tokens
    donor: Tokens
    """The prompt that was computed before."""
    known: ContentIndex

    def plan(self) -> Plan:
        """What the server plans when the request is admitted."""
        return self.known.plan(_NAMESPACE, self.prompt, prefix_len=0, resolve=lambda _path, end: end)


def random_tokens(rng: np.random.Generator, num_tokens: int, vocab: int) -> Tokens:
    """`num_tokens` ids that repeat nothing."""
    return rng.integers(3, vocab, num_tokens, dtype=np.int32)


def plant(donor: Tokens, num_tokens: int, shift: int, share: float, num_runs: int) -> Planted:
    """A plan in which `share` of `num_tokens` lies in `num_runs` equal runs of `donor`, with equal gaps between.

    The sinks are computed, a run is no shorter than the server's minimum and a token before it is its seam: what the
    planner would not plan is not measured.

    Args:
        donor: a path of at least `num_tokens + shift` tokens.
        num_tokens: of the prompt.
        shift: donor position less target position.
        share: of the prompt that is spliced, in `[0, 1)`.
        num_runs: 0 only with a share of 0.
    """
    config = MOST_REUSE
    if not num_runs or not share:
        return Planted(Plan(prefix_len=0, end=num_tokens), "")
    run_len = int(num_tokens * share) // num_runs
    num_computed = num_tokens - run_len * num_runs
    if run_len < config.min_run_tokens:
        return Planted(None, f"runs of {run_len} tokens; the planner takes {config.min_run_tokens} and more")
    if num_computed < config.sink_tokens + num_runs * max(1, config.seam_tokens):
        return Planted(None, f"{num_computed} computed tokens are fewer than the sinks and a seam before every run")
    path = Path(_NAMESPACE, [donor])
    first = max(config.sink_tokens + config.seam_tokens, num_computed // (num_runs + 1))
    ends = first + np.arange(num_runs + 1) * run_len
    # What the first gap leaves, spread over the other gaps.
    ends += np.linspace(0, num_computed - first, num_runs + 1).astype(int)
    runs = tuple(
        Run(
            target_start=int(start),
            target_end=int(start) + run_len,
            donor_start=int(start) + shift,
            donor=path,
            seam_len=config.seam_tokens,
        )
        for start in ends[:-1]
    )
    return Planted(Plan(prefix_len=0, end=num_tokens, runs=runs), "")


def make_lookup(rng: np.random.Generator, run_tokens: int, vocab: int, index_tokens: int) -> Lookup:
    """A header, `run_tokens` of text that another prompt held behind a longer header, and a question.

    The index also holds `index_tokens` of other documents.
    """
    index = ContentIndex(MOST_REUSE)
    for start in range(0, index_tokens, _DOCUMENT_TOKENS):
        document = random_tokens(rng, min(_DOCUMENT_TOKENS, index_tokens - start), vocab)
        index.publish(_NAMESPACE, document, [(0, len(document))])
    text = random_tokens(rng, run_tokens, vocab)
    prompt, donor = (
        np.concatenate(
            (random_tokens(rng, header, vocab), text, random_tokens(rng, _QUESTION_TOKENS, vocab)), dtype=np.int32
        )
        for header in (_HEADER_TOKENS, _HEADER_TOKENS + SHIFT)
    )
    index.publish(_NAMESPACE, donor, [(0, len(donor))])
    return Lookup(prompt, donor, index)
