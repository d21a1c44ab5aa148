"""Chooses the runs of one prompt: few, long, each compared token by token.

The prompt is scanned from left to right for places where a known chunk may end, at any alignment. For each donor of a
chunk with an equal hash, the equal span is grown in both directions along the branch of the trie that equals the
prompt. The best span becomes a run, and the search goes on after it. Tokens compared are proportional to the tokens
covered, times the donors of a chunk, and limited by a budget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from sglang_pic.core import budget, token_loops
from sglang_pic.core.context import after_other_text, find_reordered
from sglang_pic.core.donors import DonorTable
from sglang_pic.core.guard import Guard
from sglang_pic.core.lexicon import Lexicon
from sglang_pic.core.path import Path, PlanPaths
from sglang_pic.core.plan import DropReason, Plan, PlanOptions, Run
from sglang_pic.core.policy import ReusePolicy
from sglang_pic.core.row_source import RowSource
from sglang_pic.core.run_limits import keep_spans_whole, limit_gaps, limit_runs, repair_seams
from sglang_pic.core.spans import Span, merge_spans
from sglang_pic.core.tokens import Tokens
from sglang_pic.core.trie import ANY, ELIGIBLE, Node, Trie, equal_end, equal_start

# Tokens before a span that are compared to choose between donors, and to decide whether it needs a seam.
_CONTEXT_TOKENS = 16
# The prompt is scanned in blocks, so that the inside of a long run need not be scanned.
_BLOCK_TOKENS = 16384


class _Candidate(NamedTuple):
    """A span `[start, end)` of the prompt that equals `[start - shift, end - shift)` of the path to `node`.

    `context_len` tokens before `start` are equal too, but not eligible, or in the prefix or another run.
    """

    start: int
    end: int
    shift: int
    node: Node
    context_len: int


@dataclass(frozen=True, slots=True)
class _Limits:
    """Limits of every run of one plan."""

    stop: int
    """Runs end here: the last token, and all from the first wanted logprob on, are computed."""
    tail_start: int
    """From here on only pinned rows, and those with exactly the same tokens before them, are spliced."""
    sink: int
    seam: int
    min_run: int
    min_spliced: int


class Planner:
    """Plans one prompt; used once.

    Args:
        policy: which runs are taken.
        options: the request's limits; their `policy` is ignored.
        trie: the paths of the prompt's namespace.
        donors: the donors on them.
        lexicon: the texts of the tokens, for the guard of changed fields.
        tokens: the prompt.
        prefix_len: length of the tree's exact match.
        rows: of the donors.
        forget: `forget(node, position)` drops the path to `node` from `position` on.
        row_lookahead: tokens after a row that it depends on: so many at the end of an equal span are computed.
    """

    def __init__(
        self,
        policy: ReusePolicy,
        options: PlanOptions,
        *,
        trie: Trie,
        donors: DonorTable,
        lexicon: Lexicon | None,
        tokens: Tokens,
        prefix_len: int,
        rows: RowSource,
        forget: Callable[[Node, int], None],
        row_lookahead: int = 0,
    ) -> None:
        self._options, self._row_lookahead = options, row_lookahead
        self._trie, self._donors = trie, donors
        self._tokens, self._prefix_len, self._end = tokens, prefix_len, len(tokens)
        self._rows, self._forget = rows, forget
        last = self._end if options.compute_from is None else min(self._end, options.compute_from + 1)
        self._limits = _Limits(
            stop=last - 1,
            tail_start=last - policy.tail_tokens,
            sink=policy.sink_tokens,
            seam=policy.seam_tokens,
            min_run=policy.min_run_tokens,
            min_spliced=policy.min_spliced_tokens,
        )
        self._guard = Guard(policy, trie=trie, tokens=tokens, lexicon=lexicon, cost=options.cost)
        # The end of the prefix or of the last run.
        self._served = prefix_len
        self._dropped: Counter[DropReason] = Counter()
        self._used: list[Node] = []
        self._computes_reordered = policy.reordered == "compute"
        self._other_tail = max(policy.tail_tokens, policy.other_tail_tokens) if policy.tail_tokens else 0
        self._paths = PlanPaths(tokens)
        # (serial of a node, shift) -> end of an equal span that is not worth a run: its other chunks are skipped.
        self._short: dict[tuple[int, int], int] = {}
        self._work = -budget.PER_FURTHER_NODE * trie.num_steps

    @property
    def work(self) -> int:
        """Cost so far, in tokens compared."""
        return self._work + budget.PER_FURTHER_NODE * self._trie.num_steps + self._paths.work + self._guard.work

    def plan(self) -> Plan:
        """The plan. Cost O(tokens after the prefix) in any case."""
        collected = self._collect()
        guarded = self._guard.protect(collected)
        fitting = self._before_tail(self._in_order(guarded.runs), collected)
        runs = self._holding_whole(self._within_limits(fitting))
        self._trie.touch(self._used)
        plan = Plan(
            prefix_len=self._prefix_len,
            end=self._end,
            runs=tuple(runs),
            changed_fields=guarded.changed_fields,
            guarded=guarded.spans,
            dropped=self._dropped,
        )
        if runs and not self._saves(plan):
            self._dropped[DropReason.COST_GATE] += len(runs)
            plan = msgspec.structs.replace(plan, runs=())
        return msgspec.structs.replace(plan, dropped=dict(self._dropped + self._guard.dropped))

    def _saves(self, plan: Plan) -> bool:
        cost = self._options.cost
        if cost is None:
            return True
        num_fetched, options = sum(map(self._num_to_fetch, plan.runs)), self._options
        before = {"num_before": options.num_before, "reads_before": options.reads_before}
        return plan.saved_us(cost, num_fetched=num_fetched, **before) > 0

    def _num_to_fetch(self, run: Run) -> int:
        """How many rows of a resolved run are on the host."""
        return self._rows.num_to_fetch(run.donor, run.donor_start, run.donor_end)

    def _collect(self) -> list[Run]:
        runs: list[Run] = []
        at = max(self._prefix_len, self._limits.sink)
        if self._limits.stop - at < self._limits.min_spliced:
            return runs
        data = self._tokens.data.cast("B")
        allowed = budget.allowed(self._end - self._prefix_len)
        heads = self._donors.heads
        while at < self._limits.stop:
            stop = min(at + _BLOCK_TOKENS, self._end)
            places, endings = self._donors.scan(self._tokens, at, stop)
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
                        self._dropped[DropReason.BUDGET] += 1
                        return runs
                i += 1
            at = max(stop, self._served)
        return runs

    def _choose(self, ending: int, data: memoryview, chunk_end: int, shift: int | None) -> Run | None:
        """The best run that covers the chunk ending at `chunk_end`, resolved; None if none is worth it."""
        # If a path is shorter in the tree, it is shortened in the trie, and another run is chosen: each round but the
        # last removes something, and rounds are bounded.
        for _ in range(self._donors.max_per_name + 1):
            donors, num_named = self._donors.ending_at(ending, data, chunk_end)
            self._work += budget.PER_DONOR + budget.PER_NAME * num_named
            best = self._best(donors, chunk_end, shift) if donors else None
            if best is None:
                return None
            run = self._make_run(best)
            if run is None:
                self._give_up(best)
                return None
            donor_end = best.end - best.shift
            resident = self._rows.num_resident(run.donor, donor_end)
            if resident >= donor_end:
                whole = self._whole(run)
                if whole is None:
                    self._give_up(best)
                    continue
                node = _node_before(best.node, whole.donor_end)
                watched = self._guard.watch(whole, node) if self._is_worth_fetching(whole) else None
                if watched is None:
                    self._give_up(best)
                else:
                    self._used.append(best.node)
                return watched
            self._dropped[DropReason.DONOR_EVICTED] += 1
            self._forget(best.node, resident)
        return None

    def _whole(self, run: Run) -> Run | None:
        """The first part of a resolved run that all layers have rows of; None, counted, if it is too short."""
        holes = self._rows.holes(run.donor, run.donor_start, run.donor_end)
        all_steps = self._options.steps
        if not holes and not all_steps:
            return run
        crossed = [part for steps in all_steps for part in steps.crossed(run.donor_start, run.donor_end, run.shift)]
        if crossed:
            holes = merge_spans([*holes, *crossed])
        start, seam = run.donor_start, run.seam_len
        for hole_start, hole_end in (*holes, (run.donor_end, run.donor_end)):
            num_tokens = hole_start - start
            if num_tokens == run.num_tokens:
                return run
            if num_tokens >= self._limits.min_spliced:
                target = start + run.shift
                return msgspec.structs.replace(
                    run, target_start=target, target_end=target + num_tokens, donor_start=start, seam_len=seam
                )
            start, seam = hole_end + self._limits.seam, self._limits.seam
        self._dropped[DropReason.POSITION_STEP if crossed else DropReason.DONOR_EVICTED] += 1
        return None

    def _best(self, donors: Sequence[int], chunk_end: int, shift: int | None) -> _Candidate | None:
        """The longest equal span worth a run, or one nearly as long whose context fits better."""
        candidates = []
        for donor in donors:
            grown = self._grow(donor, chunk_end)
            if grown is None:
                continue
            if not self._guard.admits(grown.node, grown.start, grown.end, grown.shift):
                self._give_up(grown)
                continue
            found = self._fit(grown)
            if found is not None and self._is_long_enough(found):
                candidates.append(found)
            else:
                self._give_up(grown)
                self._count_drop(found)
        if not candidates:
            return None
        if len(candidates) == 1:
            return candidates[0]
        # Rows computed after the same values are preferred at any length.
        unchanged = [found for found in candidates if not self._guard.is_changed(found.node, found.start, found.shift)]
        candidates = unchanged or candidates
        longest = max(found.end - found.start for found in candidates)
        # Among spans nearly as long: the last run's shift first, then the longer equal context.
        tolerated = longest - min(self._limits.min_run, longest // 8)
        near = [found for found in candidates if found.end - found.start >= tolerated]
        # `max` returns the first of equals: the freshest.
        return max(
            near,
            key=lambda found: (
                found.shift == shift,
                min(found.context_len, _CONTEXT_TOKENS),
                found.end - found.start,
                found.context_len,
            ),
        )

    def _grow(self, donor: int, chunk_end: int) -> _Candidate | None:
        """The equal, eligible span around the donor's chunk, after the last run; None if too short."""
        node, shift = self._donors.node(donor), chunk_end - self._donors.end(donor)
        if chunk_end <= self._short.get((node.serial, shift), 0) or self._is_short(node, chunk_end, shift):
            return None
        tokens, limits = self._tokens, self._limits
        end = min(chunk_end, limits.stop)
        low = max(self._served, limits.sink + max(shift, 0))
        first, start, differs = equal_start(node, end, shift, tokens, low, ELIGIBLE)
        context_start = start
        if not differs:
            low = max(0, shift, start - max(_CONTEXT_TOKENS, limits.min_run))
            _, context_start, _ = equal_start(first, start, shift, tokens, low, ANY)
        if chunk_end < limits.stop and start < end:
            node, end = equal_end(node, end, shift, tokens, limits.stop, ELIGIBLE)
        self._work += end - start + budget.PER_DONOR
        return _Candidate(start, end, shift, node, start - context_start) if start < end else None

    def _is_short(self, node: Node, chunk_end: int, shift: int) -> bool:
        """Whether fewer than `min_run` tokens around the chunk's end are equal; False also if one node cannot say."""
        min_run, offset = self._limits.min_run, shift + node.start
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
        self._work += high - low
        if before + after >= min_run:
            return False
        self._short[node.serial, shift] = chunk_end + after
        self._dropped[DropReason.BELOW_MIN_RUN] += 1
        return True

    def _fit(self, found: _Candidate) -> _Candidate | None:
        """The part of the span that may be spliced so near to the prompt's end; None if too little."""
        tail_start = self._limits.tail_start
        if found.end <= tail_start:
            return found
        path = self._paths.through(found.node)
        end = min(found.end, max(tail_start, self._pinned_end(path, found.shift)))
        if end == found.end or self._paths.is_exact(found.start, found.shift, path):
            return found
        if end - found.start < self._limits.seam + self._limits.min_spliced:
            return None
        return found._replace(end=end, node=_node_before(found.node, end - found.shift))

    def _pinned_end(self, donor: Path, shift: int) -> int:
        """The position in the prompt up to which a donor's rows are pinned, so that the context rule does not apply."""
        pinned_len = self._rows.pinned_len(donor)
        return pinned_len + shift if pinned_len else 0

    def _is_long_enough(self, found: _Candidate) -> bool:
        """Whether the equal span, with the equal tokens beside it that may not be spliced, has `min_run` tokens."""
        num_tokens = found.end - found.start
        missing = self._limits.min_run - num_tokens
        if missing <= 0:
            return True
        if num_tokens < self._limits.min_spliced:
            return False
        missing -= found.context_len
        if missing <= 0:
            return True
        wanted = min(self._end, found.end + missing)
        _, end = equal_end(found.node, found.end, found.shift, self._tokens, wanted, ANY)
        return end - found.end >= missing

    def _make_run(self, found: _Candidate) -> Run | None:
        """The run of a candidate after its seam, or None, counted, if it is not worth it."""
        path = self._paths.through(found.node)
        seam = 0 if self._needs_no_seam(found, path) else self._limits.seam
        start, end = found.start + seam, found.end - self._row_lookahead
        if end - start < self._limits.min_spliced:
            self._count_drop(found)
            return None
        cost = self._options.cost
        if cost is not None and cost.saves(end - start, None if start == self._served else end) <= 0:
            self._dropped[DropReason.COST_GATE] += 1
            return None
        return Run(target_start=start, target_end=end, donor_start=start - found.shift, donor=path, seam_len=seam)

    def _is_worth_fetching(self, run: Run) -> bool:
        """Whether the run saves more than fetching its rows from the host costs; counted if not."""
        cost = self._options.cost
        num_rows = 0 if cost is None else self._num_to_fetch(run)
        if cost is None or not num_rows:
            return True
        gap_start = None if run.target_start == self._served else run.target_end
        if cost.saves(run.num_tokens, gap_start) > num_rows * cost.fetched_token_us:
            return True
        self._dropped[DropReason.COST_GATE] += 1
        return False

    def _needs_no_seam(self, found: _Candidate, path: Path) -> bool:
        """Whether the span's first rows were computed after the same tokens as before it here."""
        # It directly follows the prefix or a run, and the donor's context is equal there.
        follows = found.start == self._served and found.context_len >= _CONTEXT_TOKENS
        return follows or self._paths.is_exact(found.start, found.shift, path)

    def _within_limits(self, runs: list[Run]) -> list[Run]:
        """The runs that the request's limits on runs and gaps allow."""
        max_runs, max_gaps, limits = self._options.max_runs, self._options.max_gaps, self._limits
        if max_runs is not None and len(runs) > max_runs:
            self._dropped[DropReason.MAX_RUNS] += len(runs) - max_runs
            longest = limit_runs(runs, max_runs)
            runs = repair_seams(longest, runs, limits.seam, limits.min_spliced, self._paths)
            if len(runs) < len(longest):
                self._dropped[DropReason.BELOW_MIN_RUN] += len(longest) - len(runs)
        if max_gaps is not None and len(runs) >= max_gaps:
            kept = limit_gaps(runs, max_gaps)
            self._dropped[DropReason.MAX_GAPS] += len(runs) - len(kept)
            runs = kept
        return runs

    def _before_tail(self, runs: list[Run], collected: Sequence[Run]) -> list[Run]:
        """The runs, or their parts, that may be spliced so near to the prompt's end after the donor's context.

        Args:
            runs: parts of those that were collected.
            collected: with what the guard computes of them.
        """
        spans = after_other_text(collected, self._tokens, self._limits.stop + 1, self._other_tail)
        starts = [run.target_start for run in collected]
        return self._cut(runs, [spans[bisect_right(starts, run.target_start) - 1] for run in runs], DropReason.TAIL)

    def _in_order(self, runs: list[Run]) -> list[Run]:
        """The runs without those that the prompt has reordered."""
        if not self._computes_reordered:
            return runs
        reordered = find_reordered(runs)
        return self._cut(runs, [(0, 0) if each else (0, self._end) for each in reordered], DropReason.REORDERED)

    def _cut(self, runs: list[Run], spans: Sequence[Span], reason: DropReason) -> list[Run]:
        """The parts of the runs in these spans, or that are pinned, with seams where a run before them was cut."""
        limits, fitting = self._limits, list[Run]()
        for run, (first, last) in zip(runs, spans, strict=True):
            start, end = max(first, run.target_start), min(last, run.target_end)
            pinned_end = min(self._pinned_end(run.donor, run.shift), run.target_end)
            if pinned_end >= start:
                start, end = run.target_start, max(end, pinned_end)
            elif pinned_end - run.target_start > end - start:
                start, end = run.target_start, pinned_end
            if (start, end) == (run.target_start, run.target_end) or end - start >= limits.min_spliced:
                fitting.append(run.part(start, end))
            else:
                self._dropped[reason] += 1
        if fitting == runs:
            return runs
        return repair_seams(fitting, runs, limits.seam, limits.min_spliced, self._paths)

    def _holding_whole(self, runs: list[Run]) -> list[Run]:
        """The runs, cut so that each image is inside one run or in none, with seams where a run before them was cut."""
        limits, whole = self._limits, self._options.whole
        if not whole:
            return runs
        while (held := keep_spans_whole(runs, whole, limits.min_spliced)) != runs:
            repaired = repair_seams(held, runs, limits.seam, limits.min_spliced, self._paths)
            self._dropped[DropReason.BELOW_MIN_RUN] += len(runs) - len(repaired)
            runs = repaired
        return runs

    def _is_given_up(self, ending: int, chunk_end: int) -> bool:
        """Whether every donor of this ending leads to a span that is not worth a run."""
        if not self._short:
            return False
        self._work += budget.PER_ENDING
        return self._donors.all_shorter(ending, chunk_end, self._short)

    def _count_drop(self, found: _Candidate | None) -> None:
        if found is None:
            self._dropped[DropReason.TAIL] += 1
            return
        sink = self._limits.sink
        at_sink = sink > 0 and sink in (found.start, found.start - found.shift)
        self._dropped[DropReason.SINK if at_sink else DropReason.BELOW_MIN_RUN] += 1

    def _give_up(self, found: _Candidate) -> None:
        """Skip the span's other chunks: it is not worth a run."""
        node, first = found.node, found.start - found.shift
        # A span that reaches the end of all runs is all that its later chunks lead to as well.
        end = found.end if found.end < self._limits.stop else self._end
        while node.parent is not None and node.end > first:
            self._short[node.serial, found.shift] = end
            node = node.parent


def _node_before(node: Node, end: int) -> Node:
    """The node on the path to `node` with the token before `end`."""
    while node.start >= end:
        assert node.parent is not None
        node = node.parent
    return node
