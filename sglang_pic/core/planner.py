"""Chooses the runs of one prompt: few, long, each proved equal token by token.

Owns the order of preference and the bound on work. Reads the index; changes it only through the callbacks it is given.

Chunks are visited from left to right. A hit names places in the trie; from each the equal span is grown in both
directions, down whichever branch of the trie equals the prompt. The longest wins, and the search goes on after it.
Tokens compared are proportional to the tokens covered, times the donors of a chunk; a budget holds in any case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sglang_pic.core.chunker import Chunker, Tokens
from sglang_pic.core.config import CoreConfig
from sglang_pic.core.donors import DonorTable, Heads
from sglang_pic.core.plan import DropReason, Path, Plan, PlanOptions, Run
from sglang_pic.core.trie import Segment, Trie, common_len, common_suffix_len

__all__ = ["Planner", "Resolver"]

Resolver = Callable[[Path, int], int]
"""`resolve(path, end)`: how many leading tokens of `path` have rows in the tree, looking no further than `end`."""

# Preceding tokens that are compared to prefer one donor over another.
_CONTEXT_TOKENS = 16
# Candidates are compared over at most this many times the tokens of the prompt, plus a constant for short ones.
_WORK_FACTOR = 32
_WORK_FLOOR = 1 << 16
# The prompt is cut in blocks, so that the inside of a long run need not be cut.
_BLOCK_TOKENS = 4096
# What looking at one donor costs beside the tokens it shares, in tokens.
_WORK_PER_DONOR = 64


class _Candidate(NamedTuple):
    """An equal span `[start, end)` of the prompt, whose last token lies in `segment` at `end - shift - 1`."""

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

    config: CoreConfig
    chunker: Chunker
    trie: Trie
    heads: Heads
    donors: DonorTable
    tokens: Tokens
    prefix_len: int
    end: int
    options: PlanOptions
    delimiters: frozenset[int]
    resolve: Resolver
    forget: Callable[[Segment, int], None]
    work: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)
    _paths: dict[int, Path] = field(default_factory=dict)
    _low: int = 0
    _min_run: int = 0
    _seam: int = 0

    def plan(self) -> Plan:
        """Choose the runs; O(end - prefix_len) in any case."""
        options, config = self.options, self.config
        self._low = max(self.prefix_len, config.sink_tokens)
        self._min_run = config.min_run_tokens if options.min_run_tokens is None else options.min_run_tokens
        self._seam = config.seam_tokens if options.seam_tokens is None else options.seam_tokens
        runs = self._collect()
        if options.max_runs is not None and len(runs) > options.max_runs:
            # Stable: of equally short runs the later ones go.
            longest = sorted(runs, key=lambda run: -run.num_tokens)[: options.max_runs]
            self.dropped[DropReason.MAX_GAPS] += len(runs) - len(longest)
            runs = sorted(longest, key=lambda run: run.target_start)
        if options.cost is not None and runs:
            saved = sum(options.cost.run_saves(run.num_tokens) for run in runs)
            if saved <= options.cost.request_us:
                self.dropped[DropReason.COST_GATE] += len(runs)
                runs = []
        return Plan(prefix_len=self.prefix_len, end=self.end, runs=tuple(runs), dropped=dict(self.dropped))

    def _collect(self) -> list[Run]:
        tokens, heads, key = self.tokens, self.heads, self.chunker.key
        runs: list[Run] = []
        if self.end - 1 - self._low < self._min_run:
            return runs
        data = tokens.data.cast("B")
        budget = _WORK_FLOOR + _WORK_FACTOR * (self.end - self.prefix_len)
        key_min = self.config.key_min_tokens
        block_len = max(_BLOCK_TOKENS, 4 * self.config.chunk_max_tokens)
        at = self.chunker.sync_start(tokens, self.prefix_len, self.delimiters)
        while at < self.end:
            stop = min(at + block_len, self.end)
            ends = self.chunker.cut(tokens, at, stop, delimiters=self.delimiters).ends
            if stop < self.end:
                # The block ends where no content says so: its last chunk is cut again in the next one.
                ends.pop()
            start = at
            for end in ends:
                if end > self._low and end - start >= key_min:
                    name = key(data, start, end)
                    if name in heads:
                        run = self._choose(name, end, runs[-1] if runs else None)
                        if run is not None:
                            runs.append(run)
                            self._low = run.target_end
                            if self._low > stop:
                                break
                        if self.work > budget:
                            return runs
                start = end
            # Nothing is cut inside a run: after a long one cutting falls in step again shortly before its end.
            at = start if self._low <= stop else self.chunker.sync_start(tokens, self._low, self.delimiters)
        return runs

    def _choose(self, name: int, chunk_end: int, last: Run | None) -> Run | None:
        """The best run through the chunk that ends at `chunk_end`, resolved; None if there is none worth it."""
        # A path that turns out to be shorter in the tree is shortened in the trie, and the choice made again: each
        # round but the last removes something, and rounds are bounded.
        for _ in range(self.config.max_donors_per_chunk + 1):
            best = self._best(self.donors.of(self.heads, name), chunk_end, last)
            if best is None:
                return None
            run = self._make_run(best)
            if run is None:
                return None
            resident = self.resolve(run.donor, run.donor_end)
            if resident >= run.donor_end:
                self.trie.touch(best.segment)
                return run
            self.dropped[DropReason.DONOR_EVICTED] += 1
            self.forget(best.segment, resident)
        return None

    def _best(self, donors: Sequence[int], chunk_end: int, last: Run | None) -> _Candidate | None:
        candidates = [found for donor in donors if (found := self._grow(donor, chunk_end)) is not None]
        if not candidates:
            return None
        if len(candidates) == 1:
            return candidates[0]
        longest = max(found.end - found.start for found in candidates)
        shift = None if last is None else last.shift
        # Nearly as long is as good: then going on with the last donor, and an equal context, count for more.
        tolerated = longest - min(self._min_run, longest // 8)
        near = [found for found in candidates if found.end - found.start >= tolerated]
        # `max` keeps the first of equals, which is the freshest.
        return max(near, key=lambda found: (found.shift == shift, found.context_len, found.end - found.start))

    def _grow(self, donor: int, chunk_end: int) -> _Candidate | None:
        """The equal, eligible span around the donor's chunk, clipped to what is still to cover."""
        segment = self.donors.segments[donor]
        assert segment is not None
        donor_end = self.donors.end(donor)
        shift = chunk_end - donor_end
        limit = self.end - 1
        anchor = min(chunk_end, limit)
        start, context_len = self._grow_back(segment, anchor, shift)
        end = anchor
        if chunk_end < limit and start < anchor:
            segment, end = self._grow_on(segment, chunk_end, shift, limit)
        self.work += end - start + _WORK_PER_DONOR
        return _Candidate(start, end, shift, segment, context_len) if start < end else None

    def _grow_back(self, segment: Segment, anchor: int, shift: int) -> tuple[int, int]:
        """Where the equal span that ends at `anchor` begins, and how much more of the donor's context is equal."""
        low = max(self._low, self.config.sink_tokens + shift)
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
        """How many tokens before `at` equal the donor's, at most `_CONTEXT_TOKENS`, eligible or not."""
        low = max(0, shift, at - _CONTEXT_TOKENS)
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

    def _grow_on(self, segment: Segment, at: int, shift: int, limit: int) -> tuple[Segment, int]:
        """Where the equal span from `at` on ends, and the segment of its last token."""
        node = segment
        tokens = self.tokens
        while at < limit:
            if at - shift >= node.end:
                child = node.children.get(int(tokens[at]))
                if child is None or child.eligible_around(at - shift) is None:
                    break
                node = child
            span = node.eligible_around(at - shift)
            if span is None:
                break
            stop = min(limit, span[1] + shift)
            offset = shift + node.start
            same = common_len(node.tokens[at - offset : stop - offset], tokens[at:stop])
            at += same
            if at < stop:
                break
        return node, at

    def _make_run(self, found: _Candidate) -> Run | None:
        """The run of a candidate with its seam taken off, or None, counted, where too little is left."""
        num_tokens = found.end - found.start
        if num_tokens < self._min_run:
            # Not counted as a seam's fault: it was too short before.
            self._count_drop(found)
            return None
        path = self._path(found.segment)
        seam = self._seam
        if seam and found.shift == 0 and np.array_equal(path.tokens(found.start), self.tokens[: found.start]):
            # The rows were computed after these very tokens: they are exact.
            seam = 0
        if num_tokens - seam < self._min_run:
            self._count_drop(found)
            return None
        cost = self.options.cost
        if cost is not None and cost.run_saves(num_tokens - seam) <= 0:
            self.dropped[DropReason.COST_GATE] += 1
            return None
        start = found.start + seam
        return Run(target_start=start, target_end=found.end, donor_start=start - found.shift, donor=path, seam_len=seam)

    def _count_drop(self, found: _Candidate) -> None:
        at_sink = self.config.sink_tokens > 0 and (
            found.start == self.config.sink_tokens or found.start - found.shift == self.config.sink_tokens
        )
        self.dropped[DropReason.SINK if at_sink else DropReason.BELOW_MIN_RUN] += 1

    def _path(self, segment: Segment) -> Path:
        path = self._paths.get(segment.serial)
        if path is None:
            path = Path(self.trie.namespace, [part.tokens for part in segment.lineage()])
            self._paths[segment.serial] = path
        return path
