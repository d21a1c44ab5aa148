"""The context rule: which runs of a plan were computed after text too unlike the text before them here.

Rows depend on the text before them. A prompt that goes on, or lost some of its history, has its runs in the order in
which a donor read them, after much the same text, and the seams of the runs are all that has to be computed again.
Three kinds of runs are different (bench/results/study/context.md):

- Text that a prompt has *reordered*: documents sorted otherwise, or each from another prompt. The answer may be in any
  of them, and is wrong more often where they are spliced.
- Text near the end of a prompt that a donor has read after *another* text, such as instructions after another task:
  its first rows have read most of that text, and the answer reads its last.
- Text near the end after *steps* that the donor has not seen, such as a file that is read again: a longer seam.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from enum import Enum

import numpy as np

from sglang_pic.core.path import Path
from sglang_pic.core.plan import Run
from sglang_pic.core.spans import Span
from sglang_pic.core.tokens import Tokens

_MOST_CHANGED_SIDES = 1 / 4
"""Runs of one donor that are on the other side of a run than in the donor, in lengths of that run."""
_ROWS = 256
"""Runs that are compared with all others of their donor at a time."""
_LEAST_DONORS = 3
"""Donors of runs after other text that make a prompt reordered, if such runs are most of its plan."""
_MOST_SHIFTS = 8
"""Of the runs before, at which contexts are compared."""
_LIKE_TOKENS = 128
"""Contexts are other texts if a donor's has more tokens that the prompt lacks, or lacks more and `_MOST_UNSEEN`."""
_MOST_UNSEEN = 1 / 2
"""Share of the text before a run."""
_LEAST_UNSEEN = 96
"""A run has a longer seam if its donor lacks so many of the last tokens before it; fewer between two runs of a donor
share one."""


class _Unlike(Enum):
    """How the context of a donor differs from the text before its run."""

    NONE = "little"
    NEAR = "it lacks some of the last text"
    OTHER = "it is another text"


def find_reordered(runs: Sequence[Run]) -> list[bool]:
    """For each run of a plan whether the prompt has reordered it; cost: O(n) for n runs of a donor, O(n**2) in
    numpy if they are not in its order.

    A run is reordered if, of the runs with the same donor, those that it has changed sides with have at least a quarter
    of its length; and after another text if such runs have three donors and most of the spliced tokens.
    """
    reordered = np.zeros(len(runs), bool)
    by_donor: dict[Path, list[int]] = defaultdict(list)
    for at, run in enumerate(runs):
        by_donor[run.donor].append(at)
    for places in map(np.array, by_donor.values()):
        here, there, lengths = (
            np.array([getattr(runs[at], name) for at in places])
            for name in ("target_start", "donor_start", "num_tokens")
        )
        if (there[:-1] < there[1:]).all():
            continue
        # A few rows at a time: a prompt may have thousands of runs.
        for start in range(0, len(places), _ROWS):
            rows = slice(start, start + _ROWS)
            changed_sides = (here[rows, None] < here) != (there[rows, None] < there)
            reordered[places[rows]] = changed_sides @ lengths >= _MOST_CHANGED_SIDES * lengths[rows]
    others = [at for at, run in enumerate(runs) if run.is_other]
    num_spliced = sum(run.num_tokens for run in runs)
    if (
        len({runs[at].donor for at in others}) >= _LEAST_DONORS
        and 2 * sum(runs[at].num_tokens for at in others) > num_spliced
    ):
        reordered[others] = True
    return reordered.tolist()


def spans_by_context(runs: Sequence[Run], tokens: Tokens, last: int, num_tail: int) -> list[Span]:
    """For each run of a plan the span of the prompt in which its donor's context lets it be spliced.

    Args:
        runs: in order.
        tokens: the prompt.
        last: the end of the prompt, or of the part that may be spliced.
        num_tail: tokens at the end where no run is spliced whose donor has read another text. A run that begins in
            the last twice as many is not spliced in its first half as many either, if its donor has, or if it lacks
            some of the `num_tail` tokens before it.

    Returns:
        All up to `last` for other runs; O(tokens) in numpy for each run that is looked at.
    """
    spans = list[Span]()
    shifts: dict[int, None] = {}
    donor, start, end = None, 0, 0
    for run in runs:
        # The last one is the likeliest.
        shifts.pop(run.shift, None)
        shifts[run.shift] = None
        begin = run.target_start - run.seam_len
        is_near = begin > last - 2 * num_tail
        unlike = _Unlike.NONE
        if is_near or run.target_end > last - num_tail:
            unlike = _unlike(run, tokens, {0, *list(shifts)[-_MOST_SHIFTS:]}, num_tail)
        if unlike is _Unlike.NONE:
            donor = None
            spans.append((0, last))
            continue
        # One window for all runs that little text divides.
        if run.donor is not donor or begin - end >= _LEAST_UNSEEN:
            donor, start = run.donor, begin + num_tail // 2 if is_near else 0
        end = run.target_end
        spans.append((start, last - num_tail if unlike is _Unlike.OTHER else last))
    return spans


def _unlike(run: Run, tokens: Tokens, shifts: AbstractSet[int], near: int) -> _Unlike:
    """How a donor's context, compared at these shifts, differs from the text before its run, as far as it matters."""
    here, context = tokens[: run.target_start - run.seam_len], run.donor.tokens(run.donor_start - run.seam_len)
    seen, known = np.zeros(len(here), bool), np.zeros(len(context), bool)
    for shift in shifts:
        start, end = max(0, shift), min(len(here), len(context) + shift)
        if start < end:
            is_equal = here[start:end] == context[start - shift : end - shift]
            seen[start:end] |= is_equal
            known[start - shift : end - shift] |= is_equal
    num_foreign, num_unseen, num_near = (int(np.count_nonzero(~each)) for each in (known, seen, seen[-near:]))
    if num_foreign > _LIKE_TOKENS or num_unseen > max(_LIKE_TOKENS, _MOST_UNSEEN * len(here)):
        return _Unlike.OTHER
    return _Unlike.NEAR if num_near >= _LEAST_UNSEEN else _Unlike.NONE
