"""The context rule: which runs the prompt has put together anew, so that the rows of their donors do not fit.

Rows depend on the text before them. A prompt that goes on, or lost some of its history, has its runs in the order in
which a donor read them, and the seams of the runs are all it needs. A prompt that was put together anew has them in
another order, or each from another prompt: documents that were found for another question, or sorted otherwise. There
an answer may be in any of them, and seams do not do (bench/results/study/models.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from sglang_pic.core.path import Path
from sglang_pic.core.plan import Context, Run

_MOST_CHANGED_SIDES = 1 / 4
"""Runs of one donor that are on the other side of a run than in the donor, in lengths of that run."""
_LEAST_DONORS = 3
"""Donors of runs behind other text that make a prompt one put together anew, if such runs are most of its plan."""


def find_reordered(runs: Sequence[Run]) -> list[bool]:
    """For each run of a plan whether the prompt has put it together anew; cost: O(n**2) in numpy for n runs of a donor.

    A run is put together anew if, of the runs with the same donor, those that it has changed sides with have at least
    a quarter of its length; and with `Context.OTHER` if such runs have three donors and most of the spliced tokens.
    """
    anew = np.zeros(len(runs), bool)
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
            anew[places] = changed_sides @ lengths >= _MOST_CHANGED_SIDES * lengths
    others = [at for at, run in enumerate(runs) if run.context is Context.OTHER]
    num_spliced = sum(run.num_tokens for run in runs)
    if (
        len({runs[at].donor for at in others}) >= _LEAST_DONORS
        and 2 * sum(runs[at].num_tokens for at in others) > num_spliced
    ):
        anew[others] = True
    return anew.tolist()
