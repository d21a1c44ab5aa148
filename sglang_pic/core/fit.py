"""Fits the runs of a plan to the prompt's order, its end and its images, and to the request's limits."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import msgspec

from sglang_pic.core.context import find_reordered, spans_by_context
from sglang_pic.core.path import PlanPaths
from sglang_pic.core.plan import DropReason, Run
from sglang_pic.core.query import Query
from sglang_pic.core.spans import Span, whole_part


class Fitter:
    """Removes or shortens the runs of one plan that do not fit.

    Args:
        query: the prompt and its limits.
        paths: of the donors.
        dropped: counts runs that were removed, by reason.
    """

    def __init__(self, query: Query, paths: PlanPaths, dropped: Counter[DropReason]) -> None:
        self._query, self._limits, self._paths, self._dropped = query, query.limits, paths, dropped

    def fit(self, runs: list[Run], found: Sequence[Run]) -> list[Run]:
        """The runs, or their parts, that are spliced; in order.

        Args:
            runs: parts of those that were found.
            found: with what the guard computes of them.
        """
        return self._keep_images(self._within_limits(self._before_tail(self._in_order(runs), found)))

    def _in_order(self, runs: list[Run]) -> list[Run]:
        """The runs without those that the prompt has reordered."""
        if self._query.policy.reordered == "splice":
            return runs
        reordered = find_reordered(runs, self._query.tokens)
        return self._cut(runs, [(0, 0) if each else (0, self._query.end) for each in reordered], DropReason.REORDERED)

    def _before_tail(self, runs: list[Run], found: Sequence[Run]) -> list[Run]:
        """The parts of the runs that may be spliced so near to the prompt's end after the donor's context."""
        policy = self._query.policy
        tail = max(policy.tail_tokens, policy.other_tail_tokens) if policy.tail_tokens else 0
        spans = spans_by_context(found, self._query.tokens, self._limits.stop + 1, tail)
        starts = [run.target_start for run in found]
        return self._cut(runs, [spans[bisect_right(starts, run.target_start) - 1] for run in runs], DropReason.TAIL)

    def _cut(self, runs: list[Run], spans: Sequence[Span], reason: DropReason) -> list[Run]:
        """The parts of the runs in these spans, or that are pinned."""
        fitting = list[Run]()
        for run, (first, last) in zip(runs, spans, strict=True):
            start, end = max(first, run.target_start), min(last, run.target_end)
            pinned_end = min(self._query.rows.pinned_end(run.donor, run.shift), run.target_end)
            if pinned_end >= start:
                start, end = run.target_start, max(end, pinned_end)
            elif pinned_end - run.target_start > end - start:
                start, end = run.target_start, pinned_end
            if (start, end) == (run.target_start, run.target_end) or end - start >= self._limits.min_spliced:
                fitting.append(run.part(start, end))
            else:
                self._dropped[reason] += 1
        return runs if fitting == runs else self._repair(fitting, runs)

    def _within_limits(self, runs: list[Run]) -> list[Run]:
        """The runs that the request's limits on runs and gaps allow."""
        max_runs, max_gaps = self._query.options.max_runs, self._query.options.max_gaps
        if max_runs is not None and len(runs) > max_runs:
            self._dropped[DropReason.MAX_RUNS] += len(runs) - max_runs
            longest = limit_runs(runs, max_runs)
            runs = self._repair(longest, runs)
            self._dropped[DropReason.BELOW_MIN_RUN] += len(longest) - len(runs)
        if max_gaps is not None and len(runs) >= max_gaps:
            kept = limit_gaps(runs, max_gaps)
            self._dropped[DropReason.MAX_GAPS] += len(runs) - len(kept)
            runs = kept
        return runs

    def _keep_images(self, runs: list[Run]) -> list[Run]:
        """The runs, cut so that each image is inside one run or in none."""
        whole = self._query.rows.whole
        while whole and (held := keep_spans_whole(runs, whole, self._limits.min_spliced)) != runs:
            runs = self._repair(held, runs)
            self._dropped[DropReason.BELOW_MIN_RUN] += len(held) - len(runs)
        return runs

    def _repair(self, runs: list[Run], before: Sequence[Run]) -> list[Run]:
        return repair_seams(runs, before, self._limits.seam, self._limits.min_spliced, self._paths)


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
