"""The context rule: which runs of a plan were computed after text too unlike the text before them here.

Rows depend on the text before them. A prompt that goes on, or lost some of its history, has its runs in the order in
which a donor read them, after much the same text, and the seams of the runs are all that has to be computed again. Two
kinds of runs are different (bench/results/study/context.md):

- Text that a prompt has *reordered*: documents sorted otherwise, or each from another prompt. The answer may be in any
  of them, and is wrong more often where they are spliced.
- Text at the end of a prompt that a donor has read after *another* text: instructions after another task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from sglang_pic.core.path import Path
from sglang_pic.core.plan import Context, Run

_MOST_CHANGED_SIDES = 1 / 4
"""Runs of one donor that are on the other side of a run than in the donor, in lengths of that run."""
_LEAST_DONORS = 3
"""Donors of runs after other text that make a prompt reordered, if such runs are most of its plan."""
_LIKE_TOKENS = 128
"""Contexts are other texts if a donor's has more tokens that the prompt lacks, or lacks more and `_MOST_UNSEEN`."""
_MOST_UNSEEN = 1 / 2
"""Share of the text before a run."""


def find_reordered(runs: Sequence[Run]) -> list[bool]:
    """For each run of a plan whether the prompt has reordered it; cost: O(n**2) in numpy for n runs of a donor.

    A run is reordered if, of the runs with the same donor, those that it has changed sides with have at least a quarter
    of its length; and with `Context.OTHER` if such runs have three donors and most of the spliced tokens.
    """
    reordered = np.zeros(len(runs), bool)
    by_donor: dict[Path, list[int]] = defaultdict(list)
    for at, run in enumerate(runs):
        by_donor[run.donor].append(at)
    for places in by_donor.values():
        if len(places) > 1:
            here, there, lengths = (
                np.array([getattr(runs[at], name) for at in places])
                for name in ("target_start", "donor_start", "num_tokens")
            )
            changed_sides = (here[:, None] < here) != (there[:, None] < there)
            reordered[places] = changed_sides @ lengths >= _MOST_CHANGED_SIDES * lengths
    others = [at for at, run in enumerate(runs) if run.context is Context.OTHER]
    num_spliced = sum(run.num_tokens for run in runs)
    if (
        len({runs[at].donor for at in others}) >= _LEAST_DONORS
        and 2 * sum(runs[at].num_tokens for at in others) > num_spliced
    ):
        reordered[others] = True
    return reordered.tolist()


def other_tail_starts(runs: Sequence[Run], last: int, num_tail: int, common_len: Callable[[Path], int]) -> list[int]:
    """For each run of a plan the position from which it is not spliced because of its donor's context.

    Args:
        runs: in order.
        last: the end of the prompt, or of the part that may be spliced.
        num_tail: tokens at the end where no run is spliced whose donor has read another text.
        common_len: how many leading tokens a donor's path and the prompt have in common.

    Returns:
        `last - num_tail` for runs after another text, else `last`.
    """
    tail_start, starts = last - num_tail, []
    before: dict[Path, list[Run]] = defaultdict(list)
    for run in runs:
        is_other = run.target_end > tail_start and _is_other(run, before[run.donor], common_len(run.donor))
        starts.append(tail_start if is_other else last)
        before[run.donor].append(run)
    return starts


def _is_other(run: Run, before: Sequence[Run], common: int) -> bool:
    """Whether a donor's context is another text than that before its run.

    Args:
        run: the run.
        before: the runs of the same donor before it.
        common: how many leading tokens the donor's path and the prompt have in common.
    """
    here, there = run.target_start - run.seam_len, run.donor_start - run.seam_len
    num_like = min(common, here, there)
    for each in before:
        start = max(each.target_start - each.seam_len, common)
        num_like += max(0, min(each.target_end, there + each.shift) - start)
    return there - num_like > _LIKE_TOKENS or here - num_like > max(_LIKE_TOKENS, _MOST_UNSEEN * here)
