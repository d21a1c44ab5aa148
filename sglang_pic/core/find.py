"""Finds the runs of one prompt: few, long, each compared token by token.

The prompt is scanned from left to right for places where a known chunk may end, at any alignment. For each donor of a
chunk with an equal hash, the equal span is grown in both directions along the branch of the trie that equals the
prompt. The best span becomes a run, and the search goes on after it. Tokens compared are proportional to the tokens
covered, times the donors of a chunk, and limited by a budget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from sglang_pic.core import budget
from sglang_pic.core.equal_spans import CONTEXT_TOKENS, Candidate, EqualSpans
from sglang_pic.core.guard import Guard
from sglang_pic.core.plan import DropReason, Run
from sglang_pic.core.query import Query
from sglang_pic.core.trie import Node, node_before

# The prompt is scanned in blocks, so that the inside of a long run need not be scanned.
_BLOCK_TOKENS = 16384


class Finder:
    """The search for the runs of one plan; used once.

    Args:
        query: the prompt and its donors.
        guard: judges the changed fields before a run.
    """

    def __init__(self, query: Query, guard: Guard) -> None:
        self._query, self._guard, self._spans = query, guard, EqualSpans(query)
        # The end of the prefix or of the last run.
        self._served = query.prefix_len
        self._used: list[Node] = []
        self._steps_before = query.trie.num_steps

    @property
    def work(self) -> int:
        """Cost of the plan so far, in tokens compared."""
        steps = budget.PER_FURTHER_NODE * (self._query.trie.num_steps - self._steps_before)
        return self._query.work + steps + self._query.paths.work + self._guard.work

    def runs(self) -> list[Run]:
        """The runs, in order, disjoint, their donors resident. Cost O(tokens after the prefix) in any case."""
        runs = self._collect()
        self._query.trie.touch(self._used)
        return runs

    def _collect(self) -> list[Run]:
        query, policy, runs = self._query, self._query.policy, list[Run]()
        at = max(query.prefix_len, policy.sink_tokens)
        if query.stop - at < policy.min_spliced_tokens:
            return runs
        data = query.tokens.data.cast("B")
        allowed = budget.allowed(query.end - query.prefix_len)
        heads = query.donors.heads
        while at < query.stop:
            stop = min(at + _BLOCK_TOKENS, query.end)
            places, endings = query.donors.scan(query.tokens, at, stop)
            i = 0
            while i < len(places):
                chunk_end = places[i]
                if endings[i] in heads and not self._is_given_up(endings[i], chunk_end):
                    run = self._choose(endings[i], data, places[i], runs[-1].shift if runs else None)
                    if run is not None:
                        runs.append(run)
                        self._served = run.target_end
                        i = bisect_right(places, self._served, i) - 1
                    if self.work > allowed:
                        query.dropped[DropReason.BUDGET] += 1
                        return runs
                i += 1
            at = max(stop, self._served)
        return runs

    def _is_given_up(self, ending: int, chunk_end: int) -> bool:
        """Whether every donor of this ending leads to a span that is not worth a run."""
        if not self._spans.short:
            return False
        self._query.work += budget.PER_ENDING
        return self._query.donors.all_shorter(ending, chunk_end, self._spans.short)

    def _choose(self, ending: int, data: memoryview, chunk_end: int, shift: int | None) -> Run | None:
        """The best run that covers the chunk ending at `chunk_end`, resolved; None if none is worth it."""
        donors, spans = self._query.donors, self._spans
        # If a path is shorter in the tree, it is shortened in the trie, and another run is chosen: each round but the
        # last removes something, and rounds are bounded.
        for _ in range(donors.max_per_name + 1):
            ending_here, num_named = donors.ending_at(ending, data, chunk_end)
            self._query.work += budget.PER_DONOR + budget.PER_NAME * num_named
            best = self._best(ending_here, chunk_end, shift) if ending_here else None
            if best is None:
                return None
            run = spans.run(best, self._served)
            if run is None:
                spans.give_up(best)
                return None
            donor_end = best.end - best.shift
            resident = self._query.rows.num_resident(run.donor, donor_end)
            if resident < donor_end:
                self._query.dropped[DropReason.DONOR_EVICTED] += 1
                self._query.forget(best.node, resident)
                continue
            whole = spans.with_rows(run, self._served)
            if whole is None:
                spans.give_up(best)
                continue
            watched = self._guard.watch(whole, node_before(best.node, whole.donor_end))
            if watched is None:
                spans.give_up(best)
            else:
                self._used.append(best.node)
            return watched
        return None

    def _best(self, donors: Sequence[int], chunk_end: int, shift: int | None) -> Candidate | None:
        """The longest equal span worth a run, or one nearly as long whose context fits better."""
        candidates = []
        for donor in donors:
            grown = self._spans.grow(donor, chunk_end, self._served)
            if grown is None:
                continue
            is_admitted = self._guard.admits(grown.node, grown.start, grown.end, grown.shift)
            found = self._spans.worth_a_run(grown) if is_admitted else None
            if found is not None:
                candidates.append(found)
            else:
                self._spans.give_up(grown)
        if len(candidates) <= 1:
            return candidates[0] if candidates else None
        # Rows computed after the same values are preferred at any length.
        unchanged = [found for found in candidates if not self._guard.is_changed(found.node, found.start, found.shift)]
        candidates = unchanged or candidates
        longest = max(found.end - found.start for found in candidates)
        # Among spans nearly as long: the last run's shift first, then the longer equal context.
        tolerated = longest - min(self._query.policy.min_run_tokens, longest // 8)
        near = [found for found in candidates if found.end - found.start >= tolerated]
        # `max` returns the first of equals: the freshest.
        return max(
            near,
            key=lambda found: (
                found.shift == shift,
                min(found.context_len, CONTEXT_TOKENS),
                found.end - found.start,
                found.context_len,
            ),
        )
