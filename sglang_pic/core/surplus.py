"""Removes runs from a plan with more runs or gaps than a request may have."""

from __future__ import annotations

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


def hold_whole(runs: list[Run], whole: Sequence[Span], min_spliced: int) -> list[Run]:
    """The runs, shortened to begin and end inside no span of `whole`, without those shorter than `min_spliced` then."""
    held: list[Run] = []
    for run in runs:
        start, end = whole_part(whole, run.target_start, run.target_end)
        if (start, end) == (run.target_start, run.target_end):
            held.append(run)
        elif end - start >= min_spliced:
            seam_len = run.seam_len + start - run.target_start
            held.append(
                msgspec.structs.replace(
                    run, target_start=start, target_end=end, donor_start=start - run.shift, seam_len=seam_len
                )
            )
    return held


def repair_seams(runs: list[Run], served: int, seam: int, min_spliced: int, paths: PlanPaths) -> list[Run]:
    """The runs with a seam for each that had none because of a removed run before it.

    Args:
        runs: in order.
        served: where the exact prefix ends.
        seam: tokens of a seam.
        min_spliced: fewest tokens of a run after its seam; shorter runs are removed.
        paths: says which runs are exact and need no seam.
    """
    repaired: list[Run] = []
    for each in runs:
        run, start = each, each.target_start
        if run.seam_len < seam and start != served and not paths.is_exact(start, run.shift, run.donor):
            if run.num_tokens - seam < min_spliced:
                continue
            run = msgspec.structs.replace(
                run, target_start=start + seam, donor_start=run.donor_start + seam, seam_len=seam
            )
        repaired.append(run)
        served = run.target_end
    return repaired
