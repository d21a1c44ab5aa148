"""Chooses the runs of one prompt: few, long, each proved equal token by token.

Owns the order of preference and the bound on work. Reads the index; changes it only through the callbacks it is given.

The prompt is scanned from left to right for places where a known chunk may end, at any alignment; a chunk whose name
is equal gives places in the trie, and from each the equal span is grown in both directions, down whichever branch of
the trie equals the prompt. The best wins, and the search goes on after it. Tokens compared are proportional to the
tokens covered, times the donors of a chunk; a budget holds in any case.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from sglang_pic.core.chunker import Tokens
from sglang_pic.core.donors import DonorTable
from sglang_pic.core.plan import DropReason, Path, Plan, PlanOptions, Run
from sglang_pic.core.policy import ReusePolicy
from sglang_pic.core.trie import Segment, Trie, common_len, common_suffix_len

__all__ = ["Planner", "Resolver"]

Resolver = Callable[[Path, int], int]
"""`resolve(path, end)`: how many leading tokens of `path` have rows in the tree, looking no further than `end`.

Where the tree holds pages, no further than the page of the token before `end`. It must hold on to what it found: within
one plan an answer never takes back an earlier one. It must not call the index.
"""

# Preceding tokens that are compared to prefer one donor over another, and to spare a run its seam.
_CONTEXT_TOKENS = 16
# Candidates are compared over at most this many times the tokens of the prompt, plus a constant for short ones.
_WORK_FACTOR = 32
_WORK_FLOOR = 1 << 16
# The prompt is scanned in blocks, so that the inside of a long run need not be scanned.
_BLOCK_TOKENS = 16384
# What looking at one donor costs beside the tokens it shares, in tokens; what naming a span to compare it with another
# name costs; and what a segment costs on the way to the root. About 20 ns a token, on the machine of the design notes.
_WORK_PER_DONOR = 64
_WORK_PER_NAME = 8
_WORK_PER_SEGMENT = 4
# Tokens of a donor's context that are looked for in the prompt at the cost of comparing one.
_CONTEXT_PER_WORK = 16
# Tokens of a donor's path that are copied at the cost of comparing one.
_COPIED_TOKENS = 64


class _Candidate(NamedTuple):
    """An equal span `[start, end)` of the prompt, whose last token lies in `segment` at `end - shift - 1`.

    `context_len` tokens before `start` equal the donor's too, but cannot be spliced from it, or are served already.
    """

    start: int
    end: int
    shift: int
    segment: Segment
    context_len: int


@dataclass(slots=True)
class Planner:
    """One planning of one prompt; made, used once, thrown away.

    `forget` takes `(segment, position)` and drops the path to `segment` from `position` on.
    """

    policy: ReusePolicy
    trie: Trie
    donors: DonorTable
    tokens: Tokens
    prefix_len: int
    end: int
    options: PlanOptions
    resolve: Resolver
    forget: Callable[[Segment, int], None]
    work: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)
    _paths: dict[int, Path] = field(default_factory=dict)
    # How many leading tokens a path shares with the prompt; the same donor may serve thousands of runs.
    _equal_lens: dict[Path, int] = field(default_factory=dict)
    # (segment, shift) -> end of an equal span there that is not worth a run: its other chunks lead to the same place.
    _short: dict[tuple[int, int], int] = field(default_factory=dict)
    _used: list[Segment] = field(default_factory=list)
    _served: int = 0
    _low: int = 0
    _stop: int = 0
    _min_run: int = 0
    _min_spliced: int = 0
    _seam: int = 0
    _tail_start: int = 0
    _near_start: int = 0
    _num_misfits: int = 0

    def plan(self) -> Plan:
        """Choose the runs; O(end - prefix_len) in any case."""
        options, policy = self.options, self.policy
        # Up to here tokens are served by the prefix or a run; runs begin at `_low` or later.
        self._served = self.prefix_len
        self._low = max(self.prefix_len, policy.sink_tokens)
        last = self.end if options.compute_from is None else min(self.end, options.compute_from + 1)
        self._stop = last - 1
        self._min_run = policy.min_run_tokens
        self._min_spliced = min(policy.min_spliced_tokens, self._min_run)
        self._seam = policy.seam_tokens
        self._tail_start, self._near_start = last - policy.tail_tokens, last - policy.near_tails * policy.tail_tokens
        runs = self._limit_gaps(self._limit_runs(self._collect()))
        self.trie.touch(self._used)
        plan = Plan(prefix_len=self.prefix_len, end=self.end, runs=tuple(runs), dropped=dict(self.dropped))
        cost = options.cost
        if cost is not None and runs and cost.saves(plan.num_spliced, len(plan.gaps) - 1) <= cost.request_us:
            self.dropped[DropReason.COST_GATE] += len(runs)
            plan = Plan(prefix_len=self.prefix_len, end=self.end, dropped=dict(self.dropped))
        return plan

    def _collect(self) -> list[Run]:
        runs: list[Run] = []
        if self._stop - self._low < self._min_spliced:
            return runs
        data = self.tokens.data.cast("B")
        budget = _WORK_FLOOR + _WORK_FACTOR * (self.end - self.prefix_len)
        heads = self.donors.heads
        at = self._low
        while at < self._stop:
            stop = min(at + _BLOCK_TOKENS, self.end)
            places, tails = self.donors.scan(self.tokens, at, stop)
            i = 0
            while i < len(places):
                if tails[i] in heads:
                    run = self._choose(tails[i], data, places[i], runs[-1].shift if runs else None)
                    if run is not None:
                        runs.append(run)
                        self._low = self._served = run.target_end
                        i = bisect_right(places, self._low, i) - 1
                    if self.work > budget:
                        return runs
                i += 1
            at = max(stop, self._low)
        return runs

    def _choose(self, tail: int, data: memoryview, chunk_end: int, shift: int | None) -> Run | None:
        """The best run through the chunk that ends at `chunk_end`, resolved; None if there is none worth it."""
        # A path that turns out to be shorter in the tree is shortened in the trie, and the choice made again: each
        # round but the last removes something, and rounds are bounded.
        for _ in range(self.donors.max_per_name + 1):
            donors, num_named = self.donors.ending_at(tail, data, chunk_end)
            self.work += _WORK_PER_DONOR + _WORK_PER_NAME * num_named
            best = self._best(donors, chunk_end, shift) if donors else None
            if best is None:
                return None
            run = self._make_run(best)
            if run is None:
                self._give_up(best)
                return None
            donor_end = best.end - best.shift
            resident = self.resolve(run.donor, donor_end)
            if resident >= donor_end:
                self._used.append(best.segment)
                return run
            self.dropped[DropReason.DONOR_EVICTED] += 1
            self.forget(best.segment, resident)
        return None

    def _best(self, donors: Sequence[int], chunk_end: int, shift: int | None) -> _Candidate | None:
        """The longest of the spans that are worth a run, or one nearly as long that fits its place better."""
        candidates = []
        for donor in donors:
            grown = self._grow(donor, chunk_end)
            if grown is None:
                continue
            found = self._spare_tail(grown, shift)
            if found is not None and self._is_long_enough(found):
                candidates.append(found)
            else:
                self._give_up(grown)
                self._count_drop(found)
        if not candidates:
            return None
        if len(candidates) == 1:
            return candidates[0]
        longest = max(found.end - found.start for found in candidates)
        # Nearly as long is as good: then going on with the last donor, and an equal context, count for more.
        tolerated = longest - min(self._min_run, longest // 8)
        near = [found for found in candidates if found.end - found.start >= tolerated]
        # `max` keeps the first of equals, which is the freshest.
        return max(
            near,
            key=lambda found: (
                found.shift == shift,
                min(found.context_len, _CONTEXT_TOKENS),
                found.end - found.start,
                found.context_len,
            ),
        )

    def _spare_tail(self, found: _Candidate, last_shift: int | None) -> _Candidate | None:
        """The span as far as its rows may be spliced; None where nothing worth a copy is left."""
        end = min(found.end, self._reach(found, last_shift))
        if end == found.end:
            return found
        if end - found.start < self._seam + self._min_spliced:
            return None
        segment = found.segment
        while segment.start >= end - found.shift:
            assert segment.parent is not None
            segment = segment.parent
        return found._replace(end=end, segment=segment)

    def _reach(self, found: _Candidate, last_shift: int | None) -> int:
        """Up to where the span's rows may be spliced: the better its donor's context fits, the nearer to the end."""
        if found.end <= self._near_start:
            return found.end
        if self._num_misfits >= self.policy.max_misfits:
            return self._near_start
        at = max(found.start, self._near_start)
        num_foreign, num_unseen = self._misfit(found, at, last_shift)
        if num_foreign <= self.policy.foreign_tokens and 100 * num_unseen <= self.policy.unseen_percent * at:
            return found.end
        reach = self._tail_start if 100 * num_unseen <= self.policy.near_unseen_percent * at else self._near_start
        self._num_misfits += reach < found.end
        return reach

    def _misfit(self, found: _Candidate, at: int, last_shift: int | None) -> tuple[int, int]:
        """How many tokens before the donor's of `at` do not stand before `at`, and how many of those it does not know.

        The donor's tokens are looked for where they stood, and where this run or the one before it moves them. What is
        found elsewhere does not count, so an answer may be too strict. A token of the donor stands for one here.
        """
        context = self._path(found.segment).tokens(at - found.shift)
        here = self.tokens[:at]
        self.work += at // _CONTEXT_PER_WORK
        foreign, unseen = (np.ones(len(tokens), dtype=np.bool_) for tokens in (context, here))
        for shift in {0, found.shift, last_shift or 0}:
            low, high = max(0, -shift), min(len(context), at - shift)
            if low < high:
                differs = context[low:high] != here[low + shift : high + shift]
                foreign[low:high] &= differs
                unseen[low + shift : high + shift] &= differs
        return int(np.count_nonzero(foreign)), max(int(np.count_nonzero(unseen)), at - len(context))

    def _grow(self, donor: int, chunk_end: int) -> _Candidate | None:
        """The equal, eligible span around the donor's chunk, clipped to what is left; None if too short."""
        segment = self._segment(donor)
        shift = chunk_end - self.donors.end(donor)
        if chunk_end <= self._short.get((segment.serial, shift), 0):
            return None
        if self._is_short(segment, chunk_end, shift):
            return None
        anchor = min(chunk_end, self._stop)
        start, context_len = self._grow_back(segment, anchor, shift)
        end = anchor
        if chunk_end < self._stop and start < anchor:
            segment, end = self._grow_on(segment, chunk_end, shift)
        self.work += end - start + _WORK_PER_DONOR
        return _Candidate(start, end, shift, segment, context_len) if start < end else None

    def _is_short(self, segment: Segment, chunk_end: int, shift: int) -> bool:
        """Whether fewer than `_min_run` tokens around the chunk's end are equal, by one comparison; may miss some."""
        offset = shift + segment.start
        low = max(0, chunk_end - self._min_run, offset)
        high = min(chunk_end + self._min_run, offset + len(segment.tokens), self.end)
        equal = (segment.tokens[low - offset : high - offset] == self.tokens[low:high]).tobytes()
        before = equal.rfind(b"\0", 0, chunk_end - low)
        after = equal.find(b"\0", chunk_end - low)
        if (before < 0 < low) or (after < 0 and high < self.end):
            return False
        self.work += high - low
        if after < 0:
            after = len(equal)
        if after - before > self._min_run:
            return False
        self._short[segment.serial, shift] = low + after
        self.dropped[DropReason.BELOW_MIN_RUN] += 1
        return True

    def _grow_back(self, segment: Segment, anchor: int, shift: int) -> tuple[int, int]:
        """Where the equal span that ends at `anchor` begins, and how much more of the donor's context is equal."""
        low = max(self._low, self.policy.sink_tokens + shift)
        at = anchor
        node = segment
        while at > low:
            while at - shift <= node.start:
                assert node.parent is not None
                node = node.parent
            span = node.eligible_around(at - shift - 1)
            if span is None:
                break
            floor = max(low, span[0] + shift)
            offset = shift + node.start
            same = common_suffix_len(node.tokens[floor - offset : at - offset], self.tokens[floor:at])
            at -= same
            if at > floor:
                return at, 0
        return at, self._context_len(node, at, shift)

    def _context_len(self, node: Segment, at: int, shift: int) -> int:
        """How many tokens before `at` equal the donor's, eligible or not, as far as that matters."""
        low = max(0, shift, at - max(_CONTEXT_TOKENS, self._min_run))
        begin = at
        while at > low:
            while at - shift <= node.start:
                assert node.parent is not None
                node = node.parent
            offset = shift + node.start
            floor = max(low, offset)
            same = common_suffix_len(node.tokens[floor - offset : at - offset], self.tokens[floor:at])
            at -= same
            if at > floor:
                break
        return begin - at

    def _grow_on(self, segment: Segment, at: int, shift: int) -> tuple[Segment, int]:
        """Where the equal, eligible span from `at` on ends, and the segment of its last token."""
        node = segment
        tokens = self.tokens
        while at < self._stop:
            if at - shift >= node.end:
                child = node.children.get(int(tokens[at]))
                if child is None or child.eligible_around(at - shift) is None:
                    break
                node = child
            span = node.eligible_around(at - shift)
            if span is None:
                break
            stop = min(self._stop, span[1] + shift)
            offset = shift + node.start
            same = common_len(node.tokens[at - offset : stop - offset], tokens[at:stop])
            at += same
            if at < stop:
                break
        return node, at

    def _equal_after(self, found: _Candidate, wanted: int) -> int:
        """How many tokens after the span equal the donor's, eligible or not, looking no further than `wanted`."""
        node, at, limit = found.segment, found.end, min(self.end, found.end + wanted)
        while at < limit:
            if at - found.shift >= node.end:
                child = node.children.get(int(self.tokens[at]))
                if child is None:
                    break
                node = child
            offset = found.shift + node.start
            stop = min(limit, offset + len(node.tokens))
            same = common_len(node.tokens[at - offset : stop - offset], self.tokens[at:stop])
            at += same
            if at < stop:
                break
        return at - found.end

    def _is_long_enough(self, found: _Candidate) -> bool:
        """Whether the equal span is worth a run, counting what is equal beside the part that may be spliced."""
        num_tokens = found.end - found.start
        missing = self._min_run - num_tokens
        if missing <= 0:
            return True
        if num_tokens < self._min_spliced:
            return False
        missing -= found.context_len
        return missing <= 0 or self._equal_after(found, missing) >= missing

    def _make_run(self, found: _Candidate) -> Run | None:
        """The run of a candidate with its seam taken off, or None, counted, where that is not worth it."""
        path = self._path(found.segment)
        seam = 0 if self._needs_no_seam(found, path) else self._seam
        start = found.start + seam
        if found.end - start < self._min_spliced:
            self._count_drop(found)
            return None
        cost = self.options.cost
        if cost is not None:
            num_gaps = 0 if start == self._served else 1
            if cost.saves(found.end - start, num_gaps) <= 0:
                self.dropped[DropReason.COST_GATE] += 1
                return None
        return Run(target_start=start, target_end=found.end, donor_start=start - found.shift, donor=path, seam_len=seam)

    def _needs_no_seam(self, found: _Candidate, path: Path) -> bool:
        """Whether the span's first rows were computed after the tokens that stand before it here."""
        # Nothing is computed between it and what is served before it, and the donor saw the same there.
        follows = found.start == self._served and found.context_len >= _CONTEXT_TOKENS
        return follows or self._is_exact(found.start, found.shift, path)

    def _is_exact(self, start: int, shift: int, path: Path) -> bool:
        """Whether a span's rows were computed after the very tokens that stand before it here, from position 0 on."""
        if shift != 0:
            return False
        if path not in self._equal_lens:
            self._equal_lens[path] = common_len(path.tokens(self.end), self.tokens)
        return start <= self._equal_lens[path]

    def _limit_runs(self, runs: list[Run]) -> list[Run]:
        most = self.options.max_runs
        if most is None or len(runs) <= most:
            return runs
        # Stable: of equally short runs the later ones go.
        longest = sorted(runs, key=lambda run: -run.num_tokens)[:most]
        self.dropped[DropReason.MAX_RUNS] += len(runs) - len(longest)
        return self._repair_seams(sorted(longest, key=lambda run: run.target_start))

    def _limit_gaps(self, runs: list[Run]) -> list[Run]:
        """Keep the longest stretches of adjoining runs: each one adds a gap, and one is left in any case."""
        most = self.options.max_gaps
        if most is None or len(runs) < most:
            return runs
        stretches: list[list[Run]] = []
        for run in runs:
            if stretches and stretches[-1][-1].target_end == run.target_start:
                stretches[-1].append(run)
            else:
                stretches.append([run])
        longest = sorted(stretches, key=lambda stretch: stretch[0].target_start - stretch[-1].target_end)[: most - 1]
        kept = sorted((run for stretch in longest for run in stretch), key=lambda run: run.target_start)
        self.dropped[DropReason.MAX_GAPS] += len(runs) - len(kept)
        return kept

    def _repair_seams(self, runs: list[Run]) -> list[Run]:
        """Give a run a seam where it had none because of a run before it that has been dropped."""
        repaired: list[Run] = []
        served = self.prefix_len
        for run in runs:
            start = run.target_start
            if run.seam_len < self._seam and start != served and not self._is_exact(start, run.shift, run.donor):
                if run.num_tokens - self._seam < self._min_spliced:
                    self.dropped[DropReason.BELOW_MIN_RUN] += 1
                    continue
                run = msgspec.structs.replace(  # noqa: PLW2901
                    run,
                    target_start=start + self._seam,
                    donor_start=run.donor_start + self._seam,
                    seam_len=self._seam,
                )
            repaired.append(run)
            served = run.target_end
        return repaired

    def _segment(self, donor: int) -> Segment:
        segment = self.donors.segments[donor]
        assert segment is not None, "a donor of the table has a segment"
        return segment

    def _count_drop(self, found: _Candidate | None) -> None:
        if found is None:
            self.dropped[DropReason.TAIL] += 1
            return
        at_sink = self.policy.sink_tokens > 0 and (
            found.start == self.policy.sink_tokens or found.start - found.shift == self.policy.sink_tokens
        )
        self.dropped[DropReason.SINK if at_sink else DropReason.BELOW_MIN_RUN] += 1

    def _give_up(self, found: _Candidate) -> None:
        """Note that the span is not worth a run, wherever a chunk of it ends."""
        node, first = found.segment, found.start - found.shift
        # A span that is cut off where runs must end is all that chunks further on lead to as well.
        end = found.end if found.end < self._stop else self.end
        while node.parent is not None and node.end > first:
            self._short[node.serial, found.shift] = end
            node = node.parent

    def _path(self, segment: Segment) -> Path:
        """A path through `segment`, one for all segments on it: a conversation is joined and resolved once.

        It goes on below, along the newest children: in a tree of pages the last token of a segment is resident only
        together with what follows it in its page.
        """
        path = self._paths.get(segment.serial)
        if path is None:
            leaf = segment
            while leaf.children:
                leaf = leaf.children[next(reversed(leaf.children))]
            line = leaf.lineage()
            path = Path(self.trie.namespace, [part.tokens for part in line])
            for part in line:
                self._paths.setdefault(part.serial, path)
            self.work += _WORK_PER_SEGMENT * len(line) + segment.end // _COPIED_TOKENS
        return path
