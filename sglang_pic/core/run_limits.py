"""Removes runs from a plan with more runs or gaps than a request may have."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from sglang_pic.core.path import PlanPaths
from sglang_pic.core.plan import Run
from sglang_pic.core.spans import Span, whole_part


def limit_runs(runs: list[Run], most: int) -> list[Run]:
    """The `most` longest runs, in order; the earlier one of equals."""
    longest = sorted(runs, key=lambda run: -run.num_tokens)[:most]
    return sorted(longest, key=lambda run: run.target_start)


def limit_gaps(runs: list[Run], most: int) -> list[Run]:
    """The longest stretches of adjoining runs that make at most `most` gaps, in order; each stretch adds one."""
    stretches: list[list[Run]] = []
    for run in runs:
        if stretches and stretches[-1][-1].target_end == run.target_start:
            stretches[-1].append(run)
        else:
            stretches.append([run])
    longest = sorted(stretches, key=lambda stretch: stretch[0].target_start - stretch[-1].target_end)[: most - 1]
    return sorted((run for stretch in longest for run in stretch), key=lambda run: run.target_start)


def keep_spans_whole(runs: list[Run], whole: Sequence[Span], min_spliced: int) -> list[Run]:
    """The runs, shortened to begin and end inside no span of `whole`, without those shorter than `min_spliced` then."""
    held: list[Run] = []
    for run in runs:
        start, end = whole_part(whole, run.target_start, run.target_end)
        if (start, end) == (run.target_start, run.target_end) or end - start >= min_spliced:
            held.append(run.part(start, end))
    return held


def repair_seams(
    runs: Sequence[Run], before: Sequence[Run], seam: int, min_spliced: int, paths: PlanPaths
) -> list[Run]:
    """The runs with a seam for each whose run before it was removed or shortened at its end.

    Args:
        runs: in order, parts of those in `before`.
        before: the runs of which some were removed or shortened.
        seam: tokens of a seam.
        min_spliced: fewest tokens of a run after its seam; shorter runs are removed.
        paths: says which runs are exact and need no seam.
    """
    repaired: list[Run] = []
    starts = [run.target_start for run in before]
    for run in runs:
        start, at = run.target_start, bisect_right(starts, run.target_start) - 1
        follows = at == 0 or (repaired and repaired[-1].target_end == before[at - 1].target_end)
        if follows or run.seam_len >= seam or paths.is_exact(start, run.shift, run.donor):
            repaired.append(run)
        elif run.num_tokens - seam >= min_spliced:
            repaired.append(msgspec.structs.replace(run.part(start + seam, run.target_end), seam_len=seam))
    return repaired
