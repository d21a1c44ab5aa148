"""A long random run of one scheduler: SGLang's own tree and allocator, our index, planner and pins, and rows that know
what they hold.

With `run` it is one of several tensor-parallel ranks, which are processes with seeds of their own for hashes. What
may differ between ranks differs on purpose: slot numbers, clocks, addresses of objects, and when memory is collected.
After every step the ranks compare digests of all that was decided.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.mem_cache import base_prefix_cache as base
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from torch.cpu import Event

from sglang_pic.adapter.features.hicache.hicache_tree import HiCacheTree
from sglang_pic.adapter.features.hicache.host_tier import HostTier
from sglang_pic.adapter.features.pins import Pins
from sglang_pic.adapter.features.window_rows import WindowTier
from sglang_pic.adapter.metrics import Series
from sglang_pic.adapter.probe.window_slots import alloc_anew
from sglang_pic.adapter.serve.faults import Faults
from sglang_pic.adapter.serve.modes import Modes
from sglang_pic.adapter.serve.options import Mode
from sglang_pic.adapter.serve.planning import Limits
from sglang_pic.adapter.serve.publish import Publication
from sglang_pic.adapter.serve.receive import receive
from sglang_pic.adapter.serve.rows import ON_DEVICE, Piece, Place, RowTier
from sglang_pic.adapter.serve.tree import PicRadixCache, adopted_again
from sglang_pic.config import PicConfig
from sglang_pic.core import MESSAGE_BREAK, ContentIndex, CoreConfig, CostModel, Lexicon, Plan, RowNames
from tests.helpers.builders import make_allocator, make_planning, make_stations, make_tree, request
from tests.helpers.core_builders import sizes_of
from tests.helpers.host_rows import HostRows, attach_host, attach_store
from tests.helpers.processes import join_group
from tests.helpers.traffic import BREAK, NUM_WORDS, Traffic

POOL, MAX_PINNED, WINDOW = 8192, 1024, 48
MOST_RUNNING = 4
TEXTS = [MESSAGE_BREAK, "\n", ":", *(f" w{number}x" for number in range(NUM_WORDS))]
SHORT = {
    "seam_tokens": 8,
    "tail_tokens": 16,
    "other_tail_tokens": 0,
    "reordered": "splice",
    "min_run_tokens": 32,
    "min_spliced_tokens": 16,
}
CONFIG = PicConfig(core=CoreConfig(**SHORT, max_index_tokens=12_000, sink_tokens=8))
TOKENS = {"computed_token_us": 10.0, "spliced_token_us": 0.5}
COST = CostModel(**TOKENS, gap_us=500.0, request_us=80.0, floor_us=300.0, gap_floor_us=400.0)


class Row(NamedTuple):
    """What a slot holds."""

    token: int
    position: int
    space: tuple[str | None, str | None]
    is_computed: bool
    """Not spliced."""
    is_exact: bool
    """Computed, as all rows before it were."""
    following: int | None = None
    """The next token, for a draft model, which computed its own row of the slot from it."""


class Draft(NamedTuple):
    """What a server with a draft model has."""

    lookahead: int = 1
    """Tokens behind a row that the draft's own row of the slot depends on."""
    is_eagle: bool = False
    """The tree knows, and names a row by them."""


NO_DRAFT = Draft(0)


class Host(NamedTuple):
    """HiCache of a server."""

    size: int = 3 * POOL
    write_policy: str = "write_through"
    store: Path | None = None
    """Where the file store is."""
    has_side_pool: bool = False


class Fetch(NamedTuple):
    """Rows that a pass is going to read from a pool of the host, and what they have to be then."""

    pool: HostRows
    host_slots: list[int]
    rows: list[Row | None]


class Rank:
    """What one rank's scheduler has, and requests that live and end as SGLang lets them."""

    def __init__(
        self, page_size: int, shuffle: int, draft: Draft = NO_DRAFT, host: Host | None = None, num_windows: int = 0
    ) -> None:
        self.draft, self.num_windows = draft, num_windows
        self.allocator = make_allocator(POOL, page_size, num_windows)
        self.page_size, self.shuffle = page_size, shuffle
        self._shuffle()
        self.faults = Faults()
        names = RowNames(page_size, int(draft.is_eagle))
        # With a host the index has to remember what left the device.
        core = CONFIG.core if host is None else msgspec.structs.replace(CONFIG.core, max_index_tokens=8 * POOL)
        self.index = ContentIndex(core, lexicon=Lexicon(TEXTS), names=names, row_lookahead=draft.lookahead)
        self.publication = Publication(self.index, frozenset({BREAK}))
        stations = make_stations(self.index, CONFIG, publication=self.publication, faults=self.faults)
        self.eligibility = stations.eligibility
        kind, window = PicRadixCache if host is None else HiCacheTree, WINDOW if num_windows else None
        form: Any = {"kind": kind, "is_eagle": draft.is_eagle, "window": window}
        self.tree = make_tree(self.allocator, stations=stations, **form)
        # Where windows have a pool of their own, what its slots hold.
        self.window_rows: dict[int, Row] = {}
        self.pins = Pins(self.index, self.eligibility, MAX_PINNED, Series((), None))
        stations.features.append(self.pins)
        self.running: list[Any] = []
        # By slot. A slot that was given back keeps its row until another request writes it, as a real one does.
        self.rows: dict[int, Row] = {}
        self.counts: Counter[str] = Counter()
        self.host_pool: HostRows | None = None
        self.fetches: list[Fetch] = []
        self.loads = True
        """Whether what an exact match has on the host is loaded back, most of the time."""
        if host is not None:
            on_host = (self.window_rows, host.size * num_windows // POOL) if num_windows else None
            sizes = (host.size, host.write_policy, on_host)
            self.host_pool = attach_host(self.tree, self.rows, *sizes, has_side_pool=host.has_side_pool)
            if host.store is not None:
                for pool in filter(None, (self.host_pool, self.host_pool.beside)):
                    pool.decode = _decoded
                attach_store(self.tree, host.store)
        tier: RowTier = stations.features.find(HostTier) or ON_DEVICE
        tier = WindowTier(self.tree, self._table(), tier) if num_windows else tier
        self.planning = make_planning(stations, limits=Limits(32, 1 << 24), cost=COST, tier=tier)

    def start(self, tokens: list[int], pic: dict[str, Any], num_before: int, **fields: Any) -> list[object]:
        """Match, plan, take slots; what was decided."""
        req = request(tokens, pic, **fields)
        ids = req.origin_input_ids
        receive(req, self.tree.features, CONFIG.core, Modes())
        key = RadixKey(ids[: len(ids) - 1], req.extra_key, cache_salt=req.cache_salt)
        if self._has_store():
            self._arrive(req, key)
        found = self.tree.match_prefix(base.MatchPrefixParams(key=key, req=req))
        req.prefix_len, req.last_node = found.device_prefix_len, found.last_device_node
        # As admission does: behind what is promised, and once more where a load brings other tokens.
        promised, options = req.prefix_len + found.host_hit_length, {"max_gaps": 24, "num_before": num_before}
        self.planning.plan(req, self.tree, prefix_len=promised, **options)
        node = self._load_back(req, found)
        req.lock = self.tree.lock(node)
        if req.prefix_len < promised or (req.pic.pending is not None and req.prefix_len > promised):
            self.counts["planned again"] += 1
            self.planning.plan(req, self.tree, **options)
        missing = len(ids) - req.prefix_len
        missing += -missing % self.page_size
        evict_from_tree_cache(self.tree, missing)
        own = self._alloc(missing)
        pending = req.pic.pending
        made = None if pending is None else pending.plan
        if made is not None:
            self.counts["plans with runs"] += 1
            self.counts["runs"] += len(made.runs)
            self.counts["changed fields"] += len(made.changed_fields)
            self.counts.update({str(reason.value): number for reason, number in made.dropped.items()})
        req.is_computed = False
        prefix = self.tree.path_device_indices(node)[: req.prefix_len]
        req.pic.prefix = self.publication.prefix_of(req)
        self._check_prefix(req, prefix.tolist())
        told: list[object] = [req.prefix_len, req.pic.prefix, missing, own is None]
        told += [_told(made), _reasons(req.pic.last_plan.dropped)]
        self.counts["plans"] += 1
        if own is None:
            req.pic.release_row()
            self.tree.unlock(req.lock)
            self.counts["refused for memory"] += 1
            return told
        req.slots = torch.cat([prefix, own])
        admitted = req.pic.admit(req.prefix_len, len(ids), first_chunk=True)
        req.pic.count(admitted)
        told.append(_told(admitted))
        self.running.append(req)
        return told

    def _arrive(self, req: Any, key: Any) -> None:
        """Look in the store for the request's prefix, and wait for it as admission does."""
        tree, found = self.tree, self.tree.match_prefix(base.MatchPrefixParams(key=key))
        self.counts["arrivals"] += 1
        req.cache_request_handle = base.CacheRequestHandle(str(self.counts["arrivals"]), 0)
        req.prefix_len, req.host_hit_length = found.device_prefix_len, found.host_hit_length
        matched, node = found.device_prefix_len + found.host_hit_length, found.last_host_node
        if not tree.is_backuped(node) and not tree.is_root(node):
            return
        asked = (req.cache_request_handle, node, key.token_ids[matched:], tree.get_last_hash_value(node), None)
        space = {"extra_key": req.extra_key, "cache_salt": req.cache_salt}
        tree.prefetch_from_storage(*asked, matched_prefix_tokens=key.token_ids[:matched], **space)
        if self.counts["arrivals"] % 16 == 0:
            tree.release_aborted_request(req.cache_request_handle)
        deadline = time.monotonic() + 120
        while not tree.check_prefetch_progress(req.cache_request_handle):
            assert time.monotonic() < deadline, "a request waits for ever"
            self.check_events()
            time.sleep(0.0005)
        self.counts["prefix stored"] += tree.pop_prefetch_loaded_span(req.cache_request_handle)[0]

    def _load_back(self, req: Any, found: Any) -> Any:
        """Load what the exact match has on the host, as SGLang does at admission; returns the last node on the device.

        Now and then SGLang does not: what it would load is too short, or there is no room.
        """
        req.kv = SimpleNamespace(mamba_pool_idx=None)
        req.swa_host_hit_length, req.mamba_host_hit_length = found.swa_host_hit_length, 0
        if not found.host_hit_length and not found.swa_host_hit_length:
            return req.last_node
        quota = 0 if not self.loads or self.counts["plans"] % 4 == 0 else None
        asked = base.InitLoadBackParams(found.best_match_node, found.host_hit_length, mem_quota=quota, req=req)
        num_loaded, node = self.tree.init_load_back(asked)
        self.tree.ready_to_load_host_cache()
        req.prefix_len += num_loaded
        self.counts["loaded back"] += num_loaded
        self.counts["more than promised"] += num_loaded > found.host_hit_length
        return node

    def check_events(self) -> None:
        """The scheduler's round: passes end, and what they held on the host goes back."""
        if self.host_pool is not None:
            for fetch in self.fetches:
                assert [fetch.pool.rows.get(slot) for slot in fetch.host_slots] == fetch.rows, "overwritten"
            self.fetches.clear()
            self.tree.check_hicache_events()

    def forward(self, req: Any) -> None:
        """The pass of a request: rows are copied, the donors' locks go back, the rest is computed."""
        if req.is_computed:
            return
        req.is_computed = True
        ids, slots, space = req.origin_input_ids, req.slots.tolist(), _space(req)
        assert not set(slots[req.prefix_len : len(ids)]) & self._others(req), "slots of another request or of the tree"
        splice, spliced = req.pic.take_plan(), set[int]()
        if splice is not None:
            assert (splice.plan.prefix_len, splice.plan.end) == (req.prefix_len, len(ids)), "slots of the tree"
            assert sum(piece.end - piece.start for piece in splice.pieces) == splice.plan.num_spliced
            for piece in splice.pieces:
                is_there = piece.place is Place.HOST and self.host_pool is not None
                rows = self.host_pool.rows if is_there else self.rows
                run, sources = piece.run, piece.slots.tolist()
                read = [rows.get(slot) for slot in sources]
                donor_space = run.donor.namespace[:2]  # type: ignore[index]
                assert donor_space[1] == space[1]
                assert _client_key(donor_space[0]) == _client_key(space[0])
                places = range(piece.start, piece.end)
                exact = [row is not None and row.is_exact for row in read]
                assert read == [
                    Row(ids[at], at - run.shift, donor_space, True, is_exact, self._next(ids, at))
                    for at, is_exact in zip(places, exact, strict=True)
                ], "a spliced row is not the row of that token at that place, computed there"
                spliced.update(places)
                self.counts["rows read" if rows is self.rows else "rows fetched"] += len(places)
                if rows is not self.rows and self.host_pool is not None:
                    self.host_pool.check_beside(sources)
                    self.fetches.append(Fetch(self.host_pool, sources, read))
                if piece.windows is not None:
                    self._read_windows(piece, read)
                self.counts["rows split"] += len(places) if piece.place is Place.WINDOWS_ON_HOST else 0
            if splice.num_fetched and self.host_pool is not None:
                self.tree.host.hold(splice.locks, splice.num_fetched, (Event(), Event()))
            else:
                splice.locks.close()
        is_exact = req.prefix_len == 0 or self.rows[slots[req.prefix_len - 1]].is_exact
        for at in range(req.prefix_len, len(ids)):
            is_exact = is_exact and at not in spliced
            self.rows[slots[at]] = Row(ids[at], at, space, at not in spliced, is_exact, self._next(ids, at))
        if self.num_windows:
            written = self._table()[req.slots[req.prefix_len : len(ids)]].tolist()
            assert 0 not in written
            assert not {*written} & {*self.allocator.swa_attn_allocator.free_pages.tolist()} or self.page_size > 1
            self.window_rows.update(zip(written, map(self.rows.get, slots[req.prefix_len : len(ids)]), strict=True))

    def _read_windows(self, piece: Piece, rows: list[Row | None]) -> None:
        """The window rows of a copy are those of its `rows`, on the device or on the host."""
        assert piece.windows is not None
        slots = piece.windows.tolist()
        if piece.place is Place.DEVICE:
            assert torch.equal(piece.windows, self._table()[piece.slots]), "window slots that were given away"
            found = [self.window_rows.get(slot) for slot in slots]
        else:
            pool = self.tree.host_pool_group.get_pool(PoolName.SWA)
            found = [pool.rows.get(slot) for slot in slots]
            self.fetches.append(Fetch(pool, slots, found))
        # A row and its window row may be of two passes: what was backed up stays where a request brought other rows.
        assert [row and row._replace(is_exact=False) for row in found] == [
            row and row._replace(is_exact=False) for row in rows
        ], "not the rows of those tokens in the windows"

    def end(self, req: Any, *, checkpointed: bool) -> None:
        """A request ends and its row goes into the tree, or it was aborted before and its slots are free."""
        self.running.remove(req)
        req.finished_reason = FINISH_LENGTH(1) if checkpointed else FINISH_ABORT("gone")
        named = int(self.draft.is_eagle)
        length = len(req.origin_input_ids) - named
        length -= length % self.page_size
        own = req.slots[req.prefix_len :]
        if checkpointed:
            self.forward(req)
            key = RadixKey(req.origin_input_ids[: length + named], req.extra_key, cache_salt=req.cache_salt)
            params = base.InsertParams(key=key, value=req.slots[:length], prev_prefix_len=req.prefix_len)
            self._leave_windows(req, length, params)
            result = self.tree.insert(params)
            if self.eligibility.refusal(req) is None:
                again = adopted_again(result)
                self.counts["adopted again"] += sum(end - start for start, end in again)
                self.publication.publish(req, length, adopted_from=result.prefix_len, adopted_again=again)
            own = req.slots[length:]
        if len(own):
            self.allocator.free(own)
        self.tree.unlock(req.lock)
        self.tree.on_release(req, checkpointed=checkpointed)

    def flush(self) -> None:
        """All requests are aborted, and the tree is emptied."""
        for req in list(self.running):
            self.end(req, checkpointed=False)
        self.check_events()
        self.tree.reset()
        self.allocator.clear()
        self._shuffle()
        self.counts["flushes"] += 1

    def _has_store(self) -> bool:
        return isinstance(self.tree, HiCacheTree) and self.tree.store is not None

    def settle(self) -> None:
        """Everything ends: every slot is free or in the tree, and nothing is locked but pins."""
        for req in list(self.running):
            self.end(req, checkpointed=False)
        while self.tree.make_room():
            pass
        self.check_events()
        while self.tree.ongoing_backup or self.tree.ongoing_prefetch:
            self.check_events()
            # SGLang's threads write a file for each page: they need the interpreter.
            time.sleep(0.005)
        assert not self.faults.report().by_reason, "exceptions were caught"
        if self.num_windows:
            there = self.allocator.swa_available_size() + self.tree.swa_evictable_size()
            assert there == self.num_windows, "slots were lost"
        assert self._num_free() + self.tree.evictable_size() == POOL, "slots were lost"
        evict_from_tree_cache(self.tree, POOL)
        assert self._num_free() == POOL, "something is still locked"
        assert not self.num_windows or self.allocator.swa_available_size() == self.num_windows
        if self.host_pool is not None:
            self.tree.evict_host(self.host_pool.size)
            for pool in (entry.host_pool for entry in self.tree.host_pool_group.entries):
                assert pool.available_size() == pool.size, "something is still locked on the host"
        if self._has_store():
            self.tree.cache_controller._stop_storage_threads()

    def _next(self, ids: array[int], at: int) -> int | None:
        """What the draft's row of a token depends on; behind a prompt there is a token of its request's own."""
        if not self.draft.lookahead:
            return None
        self.counts["tokens sampled"] += at + 1 == len(ids)
        return ids[at + 1] if at + 1 < len(ids) else -self.counts["tokens sampled"]

    def _num_free(self) -> int:
        return int(self.allocator.full_available_size() if self.num_windows else self.allocator.available_size())

    def _table(self) -> torch.Tensor:
        table: torch.Tensor = self.allocator.get_kvcache().full_to_swa_index_mapping
        return table

    def _alloc(self, num_tokens: int) -> torch.Tensor | None:
        if num_tokens > self.allocator.available_size():
            return None
        if self.num_windows:
            return alloc_anew(self.tree, num_tokens)
        return self.allocator.alloc(num_tokens)

    def _leave_windows(self, req: Any, length: int, params: base.InsertParams) -> None:
        """Some requests gave away what was outside their last window, as all do that decode for long."""
        end = length - WINDOW - self.page_size
        end -= end % self.page_size
        self.counts["ended"] += 1
        if self.num_windows and self.counts["ended"] % 3 == 0 and end > req.prefix_len:
            self.allocator.free_swa_segment(req.slots[req.prefix_len : end], start_pos=req.prefix_len)
            params.set_evicted_seqlen(ComponentType.SWA, end)
            self.counts["windows left"] += end - req.prefix_len

    def _shuffle(self) -> None:
        """Give the free slots an order of this rank's own."""
        whole, window = (getattr(self.allocator, f"{name}_attn_allocator", None) for name in ("full", "swa"))
        for number, part in enumerate((whole or self.allocator, window)):
            if self.shuffle and part is not None:
                draw = torch.Generator().manual_seed(self.shuffle + number)
                part.free_pages = part.free_pages[torch.randperm(len(part.free_pages), generator=draw)]

    def _check_prefix(self, req: Any, slots: list[int]) -> None:
        """Rows of an exact match are the prompt's own; those that a request gets which opted out are exact."""
        wants_exact, space = req.pic.options.mode is Mode.OFF, _space(req)
        for at, slot in enumerate(slots):
            row = self.rows[slot]
            assert (row.token, row.position, row.space) == (req.origin_input_ids[at], at, space)
            assert not self.draft.is_eagle or row.following == req.origin_input_ids[at + 1]
            assert row.is_exact or not wants_exact, "a row that came from a splice reaches a request that opted out"
        known, exact = req.pic.prefix, [self.rows[slot].is_exact for slot in slots]
        if self.num_windows and slots:
            last = slots[-WINDOW:]
            seen = [self.window_rows[slot] for slot in self._table()[torch.tensor(last)].tolist()]
            assert [row[:3] for row in seen] == [self.rows[slot][:3] for slot in last], "the last window is not there"
            # As above: it may be of another pass.
            exact[-WINDOW:] = [row.is_exact and is_exact for row, is_exact in zip(seen, exact[-WINDOW:], strict=True)]
            assert all(exact) or not wants_exact, "a row that came from a splice reaches a request that opted out"
        assert sum(known) == len(slots)
        assert all(exact[: known.exact_len]), "a row that came from a splice is taken for exact"
        self.counts["inherited"] += known.approximate_len
        self.counts["unknown"] += known.unknown_len
        self.counts["taken for approximate"] += known.approximate_len > 0 and exact[-known.approximate_len]

    def _others(self, req: Any) -> set[int]:
        """Slots that are not this request's to write: free ones, and those of other requests."""
        free = self.allocator.full_attn_allocator if self.num_windows else self.allocator
        others = set(free.free_pages.tolist()) if self.page_size == 1 else set[int]()
        for other in self.running:
            if other is not req:
                others.update(other.slots.tolist())
        return others

    def state(self) -> list[object]:
        """All that later decisions depend on, without slots."""
        pins = [(pin.name, pin.tokens, pin.digest) for pin in self.pins.report().held]
        self.index.settle()
        return [
            *(self.allocator.available_size(), self.tree.evictable_size(), pins),
            *(sizes_of(self.index), list(self.index._ages)),
        ]


def _space(req: Any) -> tuple[str | None, str | None]:
    return req.extra_key, req.cache_salt


def _client_key(key: str | None) -> str:
    return (key or "").rpartition("\x1f")[2]


def _decoded(data: bytes) -> Row:
    """The row that a store has."""
    token, position, space, *others = json.loads(data)
    return Row(token, position, tuple(space), *others)


def _told(plan: Plan | None) -> object:
    if plan is None:
        return None
    runs = [
        (
            *(run.target_start, run.target_end, run.donor_start, run.seam_len, run.context.value, run.generation),
            *(repr(run.donor.namespace), hashlib.sha256(run.donor.tokens().tobytes()).hexdigest()),
        )
        for run in plan.runs
    ]
    return [plan.prefix_len, plan.end, runs, list(plan.changed_fields), list(plan.guarded), _reasons(plan.dropped)]


def _reasons(dropped: dict[Any, int]) -> list[tuple[str, int]]:
    return [(reason.value, number) for reason, number in dropped.items()]


def drive(rank: Rank, num_steps: int, seed: int, compare: Callable[[int, list[object]], None]) -> None:
    """The run: `compare(step, what was decided)` after every step."""
    traffic, rng = Traffic(seed), random.Random(seed + 1)
    for step in range(num_steps):
        told: list[object] = []
        if step % 3 == 0:
            rank.check_events()
        draw = rng.random()
        if draw < 0.002:
            rank.flush()
        elif draw < 0.1 and rank.running:
            rank.end(rng.choice(rank.running), checkpointed=False)
            rank.counts["aborts"] += 1
        elif draw < 0.3 and rank.running:
            rank.forward(rng.choice(rank.running))
        else:
            if len(rank.running) >= MOST_RUNNING:
                rank.end(rng.choice(rank.running), checkpointed=True)
            told = rank.start(
                traffic.prompt(), traffic.options(), rng.choice((0, 0, 300)), **traffic.fields_of_request()
            )
        compare(step, [*told, *rank.state()])


def disturb(rank: int) -> list[object]:
    """Let this rank's clocks and addresses be its own; what is returned has to be kept."""
    if rank == 0:
        return []
    for name, offset, factor in (("time", 86_400.0, 1.0), ("monotonic", 1e6, 1.7), ("perf_counter", 5e5, 0.6)):
        clock: Callable[[], float] = getattr(time, name)
        setattr(time, name, lambda clock=clock, offset=offset, factor=factor: offset + factor * clock())
        clock_ns: Callable[[], int] = getattr(time, f"{name}_ns")
        setattr(time, f"{name}_ns", lambda clock=clock_ns, factor=factor: int(factor * clock()) + rank)
    gc.set_threshold(50 * rank, 3, 3)
    return [bytearray(random.Random(rank).randrange(1, 5000)) for _ in range(3000 * rank)]


def run(number: int, size: int, store: str, num_steps: int, seed: int) -> None:
    """One of `size` ranks; exits with 1 where they differ, and rank 0 prints what happened as JSON."""
    torch.set_num_threads(1)
    join_group(number, size, store, timeout_s=120)
    kept = disturb(number)

    def compare(step: int, told: list[object]) -> None:
        digest = hashlib.sha256(repr(told).encode()).digest()[:8]
        mine = torch.tensor([int.from_bytes(digest, "little", signed=True)], dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(size)]
        torch.distributed.all_gather(everyone, mine)
        if any(other != everyone[0] for other in everyone):
            sys.exit(f"rank {number} and others differ at step {step}: {repr(told)[:1500]}")

    counts: Counter[str] = Counter()
    for page_size in (1, 16):
        rank = Rank(page_size, shuffle=number)
        drive(rank, num_steps // 2, seed, compare)
        rank.settle()
        counts += rank.counts
        counts["evicted from the index"] += rank.index.num_evicted_tokens
    if number == 0:
        print(json.dumps(counts))
    del kept
    torch.distributed.destroy_process_group()
