"""Fits the runs of a plan to the prompt's order, its end and its images, and to the request's limits."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

import msgspec

from sglang_pic.core.context import find_reordered, spans_by_context
from sglang_pic.core.guard import Guarded
from sglang_pic.core.plan import DropReason, Run, choices_of
from sglang_pic.core.query import Query
from sglang_pic.core.spans import Span, whole_part

_START = attrgetter("target_start")
# The fewest choices of a second pass, and tokens at its end whose attention chooses one of them.
_LEAST_TO_CHOOSE, _LEAST_ASKING = 3, 16


class Fitter:
    """Removes or shortens the runs of one plan that do not fit."""

    def __init__(self, query: Query) -> None:
        self._query, self._policy, self._dropped = query, query.policy, query.dropped

    def fit(self, guarded: Guarded, found: Sequence[Run]) -> list[Run]:
        """The runs, or their parts, that are spliced; in order.

        Args:
            guarded: parts of those that were found.
            found: with what the guard computes of them.
        """
        fitting = self._keep_images(self._within_limits(self._before_tail(self._in_order(guarded.runs), found)))
        if self._policy.reordered != "attend":
            return fitting
        conditional = [run.is_conditional for run in fitting]
        num_last = self._query.end - fitting[-1].target_end if fitting else 0
        can_choose = len(choices_of(fitting, guarded.spans)) >= _LEAST_TO_CHOOSE and num_last >= _LEAST_ASKING
        if can_choose or not any(conditional):
            return fitting
        # What is pinned of them stays.
        return [msgspec.structs.replace(run, is_conditional=False) for run in self._without(fitting, conditional)]

    def _in_order(self, runs: list[Run]) -> list[Run]:
        """The runs without those that the prompt has reordered; with `attend` these are conditional."""
        if self._policy.reordered == "splice":
            return runs
        reordered = find_reordered(runs)
        # An image is never half spliced, and is no document.
        if self._policy.reordered == "compute" or self._query.rows.whole:
            return self._without(runs, reordered)
        return [
            msgspec.structs.replace(run, is_conditional=True) if each else run
            for run, each in zip(runs, reordered, strict=True)
        ]

    def _without(self, runs: list[Run], left_out: Sequence[bool]) -> list[Run]:
        """The runs that are not reordered."""
        return self._cut(runs, [(0, 0) if each else (0, self._query.end) for each in left_out], DropReason.REORDERED)

    def _before_tail(self, runs: list[Run], found: Sequence[Run]) -> list[Run]:
        """The parts of the runs that the donor's context lets be spliced near the end, and behind gone text."""
        policy = self._policy
        if not policy.tail_tokens:
            return runs
        tail = max(policy.tail_tokens, policy.other_tail_tokens)
        spans = spans_by_context(found, self._query.tokens, self._query.stop + 1, tail)
        starts = [run.target_start for run in found]
        allowed = [
            (0, self._query.end) if run.is_conditional else spans[bisect_right(starts, run.target_start) - 1]
            for run in runs
        ]
        return self._cut(runs, allowed, DropReason.TAIL)

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
            if (start, end) == (run.target_start, run.target_end) or end - start >= self._policy.min_spliced_tokens:
                fitting.append(run.part(start, end))
            else:
                self._dropped[reason] += 1
        return self._repair(fitting, runs)

    def _within_limits(self, runs: list[Run]) -> list[Run]:
        """The runs that the request's limits on runs and gaps allow."""
        max_runs, max_gaps = self._query.options.max_runs, self._query.options.max_gaps
        if max_runs is not None and len(runs) > max_runs:
            self._dropped[DropReason.MAX_RUNS] += len(runs) - max_runs
            # The earlier one of equals.
            longest = sorted(runs, key=lambda run: -run.num_tokens)[:max_runs]
            longest.sort(key=_START)
            runs = self._repair(longest, runs)
            self._dropped[DropReason.BELOW_MIN_RUN] += len(longest) - len(runs)
        if max_gaps is not None and len(runs) >= max_gaps:
            kept = _limit_gaps(runs, max_gaps)
            self._dropped[DropReason.MAX_GAPS] += len(runs) - len(kept)
            runs = kept
        return runs

    def _keep_images(self, runs: list[Run]) -> list[Run]:
        """The runs, cut so that each image is inside one run or in none."""
        whole = self._query.rows.whole
        while whole:
            parts = [(run, run.part(*whole_part(whole, run.target_start, run.target_end))) for run in runs]
            shortest = self._policy.min_spliced_tokens
            held = [part for run, part in parts if part is run or part.num_tokens >= shortest]
            if held == runs:
                break
            runs = self._repair(held, runs)
            self._dropped[DropReason.BELOW_MIN_RUN] += len(held) - len(runs)
        return runs

    def _repair(self, runs: list[Run], before: Sequence[Run]) -> list[Run]:
        """The runs, parts of those before, with a seam for each that followed a run that was removed or shortened."""
        seam, repaired = self._policy.seam_tokens, list[Run]()
        starts = [run.target_start for run in before]
        for run in runs:
            start, at = run.target_start, bisect_right(starts, run.target_start) - 1
            follows = at == 0 or (repaired and repaired[-1].target_end == before[at - 1].target_end)
            if follows or run.seam_len >= seam or self._query.paths.is_exact(start, run.shift, run.donor):
                repaired.append(run)
            elif run.num_tokens - seam >= self._policy.min_spliced_tokens:
                repaired.append(msgspec.structs.replace(run.part(start + seam, run.target_end), seam_len=seam))
        return repaired


def _limit_gaps(runs: list[Run], most: int) -> list[Run]:
    """The longest stretches of adjoining runs that make at most `most` gaps, in order; each stretch adds one."""
    stretches: list[list[Run]] = []
    for run in runs:
        if stretches and stretches[-1][-1].target_end == run.target_start:
            stretches[-1].append(run)
        else:
            stretches.append([run])
    longest = sorted(stretches, key=lambda stretch: stretch[0].target_start - stretch[-1].target_end)[: most - 1]
    return sorted(itertools.chain.from_iterable(longest), key=_START)
