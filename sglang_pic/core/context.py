"""The context rule: which runs of a plan were computed after text too unlike the text before them here.

Rows depend on the text before them. A prompt that goes on, or lost some of its history, has its runs in the order in
which a donor read them, after much the same text, and the seams of the runs are all that has to be computed again.
Three kinds of runs are different (bench/results/study/context.md):

- Text that a prompt has *reordered*: documents sorted otherwise, or each from another prompt. The answer may be in any
  of them, and is wrong more often where they are spliced.
- Text that a donor has read after *another* text: its first rows have read most of that text, and near the end of the
  prompt the answer reads its last ones. Far from the end only text of which most is *gone* counts, as in a session of
  which the older steps were compacted.
- Text near the end after *steps* that the donor has not seen, such as a file that is read again: a longer seam.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
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
_MOST_GONE = 2.6
"""Another text is gone if the donor's context has so many tokens that the prompt lacks for each of the prompt's tokens
that it lacks."""
_LEAST_UNSEEN = 96
"""A run has a longer seam if its donor lacks so many of the last tokens before it; fewer between two runs of a donor
share one."""
_MOST_COMPARED = 64
"""Tokens in a plan, in lengths of the prompt; contexts that are left then count as gone."""
_FLAGS = 16
"""Flags that are counted at the cost of comparing a token."""


class _Unlike(Enum):
    """How the context of a donor differs from the text before its run."""

    NONE = "little"
    NEAR = "it lacks some of the last text"
    OTHER = "it is another text"
    GONE = "it is another text, of which most is gone"


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
            some of the `num_tail` tokens before it; a run anywhere is not in its first `num_tail`, if most of what its
            donor has read is gone.

    Returns:
        All up to `last` for other runs; O(tokens) in numpy for each donor and shift, `_MOST_COMPARED` times at most.
    """
    spans, contexts = list[Span](), _Contexts(runs, tokens)
    donor, start, end = None, 0, 0
    for run in runs:
        begin = run.target_start - run.seam_len
        is_near = begin > last - 2 * num_tail
        unlike = contexts.unlike(run, num_tail, is_near or run.target_end > last - num_tail)
        if unlike is _Unlike.NONE:
            donor = None
            spans.append((0, last))
            continue
        # One window for all runs that little text divides.
        if run.donor is not donor or begin - end >= _LEAST_UNSEEN:
            is_gone = unlike is _Unlike.GONE
            num_first = num_tail if is_gone else num_tail // 2
            donor, start = run.donor, begin + num_first if is_near or is_gone else 0
        end = run.target_end
        spans.append((start, last if unlike is _Unlike.NEAR else last - num_tail))
    return spans


class _Sides:
    """The tokens that a prompt and a donor's path share at some shifts: flags of both."""

    def __init__(self, here: Tokens, there: Tokens) -> None:
        self._here, self._there = here, there
        self.seen, self.known = np.zeros(len(here), bool), np.zeros(len(there), bool)
        self._shifts = set[int]()

    def compare(self, shifts: Iterable[int]) -> int:
        """Compare them at those of these shifts at which they were not; returns how many tokens that were."""
        num = 0
        for shift in {*shifts} - self._shifts:
            self._shifts.add(shift)
            start, end = max(0, shift), min(len(self._here), len(self._there) + shift)
            if start < end:
                num += end - start
                is_equal = self._here[start:end] == self._there[start - shift : end - shift]
                self.seen[start:end] |= is_equal
                self.known[start - shift : end - shift] |= is_equal
        return num


class _Contexts:
    """The contexts of a plan's donors beside the text before their runs, at the shifts of the runs so far."""

    def __init__(self, runs: Sequence[Run], tokens: Tokens) -> None:
        self._tokens, self._left = tokens, _MOST_COMPARED * len(tokens)
        self._shifts = dict[int, None]()
        self._sides, self._lasts = dict[Path, _Sides](), dict[Path, int]()
        for run in runs:
            self._lasts[run.donor] = max(run.donor_start, self._lasts.get(run.donor, 0))

    def unlike(self, run: Run, num_before: int, is_near: bool) -> _Unlike:
        """How the next run's context differs from the text before it, as far as it matters; if it is far from the
        prompt's end, only whether it is gone; near it, of `num_before` tokens whether it lacks some of the last."""
        # The last one is the likeliest.
        self._shifts.pop(run.shift, None)
        self._shifts[run.shift] = None
        if not is_near and -run.shift <= _LIKE_TOKENS - _LIKE_TOKENS / _MOST_GONE:
            # By the lengths alone: a donor's context is longer than that if text of it is gone.
            return _Unlike.NONE
        if self._left < 0:
            return _Unlike.GONE
        sides = self._sides.get(run.donor)
        if sides is None:
            sides = self._sides[run.donor] = _Sides(self._tokens, run.donor.tokens(self._lasts[run.donor]))
        shifts = list(self._shifts)[-_MOST_SHIFTS:] if is_near else [run.shift]
        self._left -= sides.compare([0, *shifts]) + run.target_start // _FLAGS
        begin = run.target_start - run.seam_len
        seen, known = sides.seen[:begin], sides.known[: begin - run.shift]
        num_foreign, num_unseen, num_near = (
            len(each) - int(np.count_nonzero(each)) for each in (known, seen, seen[-num_before:])
        )
        if num_foreign > max(_LIKE_TOKENS, _MOST_GONE * num_unseen):
            return _Unlike.GONE
        if not is_near:
            return _Unlike.NONE
        if num_foreign > _LIKE_TOKENS or num_unseen > max(_LIKE_TOKENS, _MOST_UNSEEN * begin):
            return _Unlike.OTHER
        return _Unlike.NEAR if num_near >= _LEAST_UNSEEN else _Unlike.NONE
