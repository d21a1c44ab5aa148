"""Extends a known chunk to the longest equal span of the prompt and a donor's path, and makes a run of it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from sglang_pic.core import budget, token_loops
from sglang_pic.core.path import Path
from sglang_pic.core.plan import DropReason, Run
from sglang_pic.core.query import Query
from sglang_pic.core.spans import merge_spans
from sglang_pic.core.trie import ANY, ELIGIBLE, Node, equal_end, equal_start, node_before

CONTEXT_TOKENS = 16
"""Tokens before a span that are compared to choose between donors, and to decide whether it needs a seam."""


class Candidate(NamedTuple):
    """A span `[start, end)` of the prompt that equals `[start - shift, end - shift)` of the path to `node`.

    `context_len` tokens before `start` are equal too, but not eligible, or in the prefix or another run.
    """

    start: int
    end: int
    shift: int
    node: Node
    context_len: int


class EqualSpans:
    """The equal spans of one plan."""

    def __init__(self, query: Query) -> None:
        self._query, self._policy, self._tokens, self._end = query, query.policy, query.tokens, query.end
        self._paths, self._dropped = query.paths, query.dropped
        self.short: dict[tuple[int, int], int] = {}
        """(Serial of a node, shift) -> end of an equal span that is not worth a run: its other chunks are skipped."""

    def grow(self, donor: int, chunk_end: int, served: int) -> Candidate | None:
        """The equal, eligible span around the donor's chunk, after `served`; None if too short."""
        donors = self._query.donors
        node, shift = donors.node(donor), chunk_end - donors.end(donor)
        if chunk_end <= self.short.get((node.serial, shift), 0) or self._is_short(node, chunk_end, shift):
            return None
        tokens, policy, stop = self._tokens, self._policy, self._query.stop
        end = min(chunk_end, stop)
        low = max(served, policy.sink_tokens + max(shift, 0))
        first, start, differs = equal_start(node, end, shift, tokens, low, ELIGIBLE)
        context_start = start
        if not differs:
            low = max(0, shift, start - max(CONTEXT_TOKENS, policy.min_run_tokens))
            _, context_start, _ = equal_start(first, start, shift, tokens, low, ANY)
        if chunk_end < stop and start < end:
            node, end = equal_end(node, end, shift, tokens, stop, ELIGIBLE)
        self._query.work += end - start + budget.PER_DONOR
        return Candidate(start, end, shift, node, start - context_start) if start < end else None

    def _is_short(self, node: Node, chunk_end: int, shift: int) -> bool:
        """Whether fewer than `min_run` tokens around the chunk's end are equal; False also if one node cannot say."""
        min_run, offset = self._policy.min_run_tokens, shift + node.start
        low, high, stop = chunk_end - min_run, chunk_end + min_run, offset + len(node.tokens)
        # Called for most places of a scan: conditions cost half as much as `max` and `min`.
        low = low if low > offset else offset
        low = low if low > 0 else 0
        high = high if high < stop else stop
        high = high if high < self._end else self._end
        before, after = token_loops.equal_around(
            self._tokens, chunk_end, node.tokens, chunk_end - offset, chunk_end - low, high - chunk_end
        )
        if (low and before == chunk_end - low) or (after == high - chunk_end and high < self._end):
            return False
        self._query.work += high - low
        if before + after >= min_run:
            return False
        self.short[node.serial, shift] = chunk_end + after
        self._dropped[DropReason.BELOW_MIN_RUN] += 1
        return True

    def give_up(self, found: Candidate) -> None:
        """Skip the span's other chunks: it is not worth a run."""
        node, first = found.node, found.start - found.shift
        # A span that reaches the end of all runs is all that its later chunks lead to as well.
        end = found.end if found.end < self._query.stop else self._end
        while node.parent is not None and node.end > first:
            self.short[node.serial, found.shift] = end
            node = node.parent

    def worth_a_run(self, grown: Candidate) -> Candidate | None:
        """The part of the span that may be spliced so near to the prompt's end; None, counted, if no run's worth."""
        found = self._outside_tail(grown)
        if found is not None and self._is_long_enough(found):
            return found
        self._dropped[DropReason.TAIL if found is None else self._reason(found)] += 1
        return None

    def _outside_tail(self, found: Candidate) -> Candidate | None:
        tail_start = self._query.tail_start
        if found.end <= tail_start:
            return found
        path = self._paths.through(found.node)
        end = min(found.end, max(tail_start, self._query.rows.pinned_end(path, found.shift)))
        if end == found.end or self._paths.is_exact(found.start, found.shift, path):
            return found
        if end - found.start < self._policy.seam_tokens + self._policy.min_spliced_tokens:
            return None
        return found._replace(end=end, node=node_before(found.node, end - found.shift))

    def _is_long_enough(self, found: Candidate) -> bool:
        """Whether the equal span, with the equal tokens beside it that may not be spliced, has `min_run` tokens."""
        num_tokens = found.end - found.start
        missing = self._policy.min_run_tokens - num_tokens
        if missing <= 0:
            return True
        if num_tokens < self._policy.min_spliced_tokens:
            return False
        missing -= found.context_len
        if missing <= 0:
            return True
        wanted = min(self._end, found.end + missing)
        _, end = equal_end(found.node, found.end, found.shift, self._tokens, wanted, ANY)
        return end - found.end >= missing

    def run(self, found: Candidate, served: int) -> Run | None:
        """The run of a span after its seam, or None, counted, if it is not worth it."""
        path = self._paths.through(found.node)
        seam = 0 if self._needs_no_seam(found, served, path) else self._policy.seam_tokens
        start, end = found.start + seam, found.end - self._query.row_lookahead
        if end - start < self._policy.min_spliced_tokens:
            self._dropped[self._reason(found)] += 1
            return None
        if not self._query.is_worth_it(end - start, None if start == served else end):
            self._dropped[DropReason.COST_GATE] += 1
            return None
        return Run(target_start=start, target_end=end, donor_start=start - found.shift, donor=path, seam_len=seam)

    def _needs_no_seam(self, found: Candidate, served: int, path: Path) -> bool:
        """Whether the span's first rows were computed after the same tokens as before it here."""
        # It directly follows the prefix or a run, and the donor's context is equal there.
        follows = found.start == served and found.context_len >= CONTEXT_TOKENS
        return follows or self._paths.is_exact(found.start, found.shift, path)

    def with_rows(self, run: Run, served: int) -> Run | None:
        """The first part of a resident run of which all layers have rows that can be moved; None, counted, if it is
        too short, or fetching its rows from the host costs more than it saves."""
        whole = self._first_part(run)
        cost = self._query.options.cost
        if whole is None or cost is None:
            return whole
        num_rows = self._query.rows.num_to_fetch(whole.donor, whole.donor_start, whole.donor_end)
        gap_start = None if whole.target_start == served else whole.target_end
        if not num_rows or cost.saves(whole.num_tokens, gap_start) > num_rows * cost.fetched_token_us:
            return whole
        self._dropped[DropReason.COST_GATE] += 1
        return None

    def _first_part(self, run: Run) -> Run | None:
        holes = self._query.rows.holes(run.donor, run.donor_start, run.donor_end)
        crossed = self._query.rows.unmovable(run.donor_start, run.donor_end, run.shift)
        if crossed:
            holes = merge_spans([*holes, *crossed])
        start, seam = run.donor_start, run.seam_len
        for hole_start, hole_end in (*holes, (run.donor_end, run.donor_end)):
            if hole_start - start == run.num_tokens:
                return run
            if hole_start - start >= self._policy.min_spliced_tokens:
                part = run.part(start + run.shift, hole_start + run.shift)
                return msgspec.structs.replace(part, seam_len=seam)
            seam = self._policy.seam_tokens
            start = hole_end + seam
        self._dropped[DropReason.POSITION_STEP if crossed else DropReason.DONOR_EVICTED] += 1
        return None

    def _reason(self, found: Candidate) -> DropReason:
        """Why a span has too few tokens."""
        sink = self._policy.sink_tokens
        at_sink = sink > 0 and sink in (found.start, found.start - found.shift)
        return DropReason.SINK if at_sink else DropReason.BELOW_MIN_RUN
