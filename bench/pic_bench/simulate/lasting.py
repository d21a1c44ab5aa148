"""Does the gain last? Sessions side by side in simulated time, with a pool that holds a share of what they say.

Sessions start at random moments and pause between calls; a call takes no time. Every call is served twice: by a cache
without limit, and by one whose prefix tree evicts as SGLang's does and whose chunk index has the server's bounds. With
a host (HiCache) it is served once more: what left the pool for the host still serves, there as from the pool. With a
store that several servers share it is served twice more, by stock SGLang and by this cache: stock writes all rows there
and loads prefixes, this cache keeps spliced rows apart there and loads what holds a prompt's text, too.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from pic_replay.pace import Pace
from pic_traces import Session
from pic_traces.encode.encoded import EncodedCall, Encoder
from pic_traces.session import Call

from pic_bench.simulate.store import Store, StoreCache
from pic_bench.simulate.trend import Trend, fit_trend
from sglang_pic.census.outcome import CallRef, Outcome
from sglang_pic.census.prefix_tree import PrefixTree
from sglang_pic.census.simulate import Cache
from sglang_pic.core import CoreConfig

LEAST_WINDOWS = 5
"""One in which the pool fills, and four for a trend."""


class Window(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tokens of the calls that were made in one window of time."""

    calls: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    """Served by the prefix cache."""
    chunk_tokens: int = 0
    """Served by this cache beyond that."""
    unlimited_prefix_tokens: int = 0
    """The same of a cache without limit."""
    unlimited_chunk_tokens: int = 0
    host_prefix_tokens: int = 0
    """The same of this cache with a host beside its pool; 0 where none was asked for."""
    host_chunk_tokens: int = 0
    store_stock_tokens: int = 0
    """Served by stock SGLang with the pool, the host and a shared store; 0 where no store was asked for."""
    store_prefix_tokens: int = 0
    """The same of this cache, whose prefixes may have spliced rows."""
    store_chunk_tokens: int = 0
    store_loaded_tokens: int = 0
    """Tokens that this cache loaded from the store."""


class Trends(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Trends over the windows after the warm-up; None where there are too few."""

    recovered: Trend | None
    """chunk / (prompt - prefix): what this cache serves of stock SGLang's misses."""
    kept: Trend | None
    """prefix + chunk of the pool, as a share of the same of a cache without limit."""


class Lasting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result: what `simulate --json` prints."""

    hours: float
    pause_s: float
    seed: int
    sessions: int
    servers: int = 1
    distinct_tokens: int
    """Tokens that the cache without limit holds in the end: those of distinct paths."""
    pool_tokens: int
    host_tokens: int = 0
    """Tokens that the host holds, those of the pool among them."""
    has_store: bool = False
    window_s: float
    windows: list[Window]
    warmup_windows: int
    """Windows up to the first in which the pool was full, of every server; 1 where one never was."""
    trends: Trends


class PacedCall(NamedTuple):
    """A call, and when it is made."""

    at_s: float
    file: str
    call: Call


class Setup(NamedTuple):
    """What is simulated."""

    pace: Pace
    window_s: float
    pool_share: float
    """Share of the tokens that a cache without limit holds in the end."""
    host_share: float = 0.0
    """Likewise of the host; 0 for none."""
    servers: int = 1
    """Each has a pool and a host of that size; a call goes to one of them at random."""
    has_store: bool = False
    """Whether they share a store without limit."""


def pace_calls(sessions: Sequence[tuple[str, Session]], pace: Pace) -> Iterator[PacedCall]:
    """The calls of sessions side by side, in the order in which they are made; each session with its file."""
    # The number keeps sessions apart that start at the same moment.
    waiting = []
    for number, (file, session) in enumerate(sessions):
        times, calls = pace.times(session), session.calls()
        waiting.append((next(times), number, file, calls, times))
    heapq.heapify(waiting)
    while waiting:
        at_s, number, file, calls, times = heapq.heappop(waiting)
        call = next(calls, None)
        if call is not None:
            yield PacedCall(at_s, file, call)
            heapq.heappush(waiting, (at_s + next(times, 0.0), number, file, calls, times))


def simulate_lasting(
    sessions: Sequence[tuple[str, Session]], encoder: Encoder, config: CoreConfig, setup: Setup
) -> Iterator[Lasting | None]:
    """Serve every call, and yield None for each service; the result comes last.

    Args:
        sessions: each with its file.
        encoder: turns calls into token ids.
        config: the server's settings.
        setup: pace, windows, and what each server has.
    """
    windows = [Window() for _ in range(round(setup.pace.spread_s / setup.window_s))]
    simulation = _Simulation(sessions, encoder, config, setup, windows)
    cache = Cache(config, encoder)
    for _, window, outcome in simulation.serve([cache] * setup.servers):
        window.unlimited_prefix_tokens += outcome.prefix_len
        window.unlimited_chunk_tokens += outcome.num_chunk_hit
        yield None
    distinct_tokens = cache.num_tokens
    pool_tokens = max(1, round(setup.pool_share * distinct_tokens))
    caches, warmup = simulation.caches(pool_tokens), 1
    for at_s, window, outcome in simulation.serve(caches):
        window.calls += 1
        window.prompt_tokens += len(outcome.encoded.tokens)
        window.prefix_tokens += outcome.prefix_len
        window.chunk_tokens += outcome.num_chunk_hit
        if not all(cache.has_evicted for cache in caches):
            warmup = int(at_s / setup.window_s) + 1
        yield None
    if not all(cache.has_evicted for cache in caches):
        warmup = 1
    host_tokens = round(setup.host_share * distinct_tokens)
    # SGLang copies what it stores to the host at once, so the host has what the pool has, and more.
    most_tokens = max(pool_tokens, host_tokens)
    if host_tokens:
        for _, window, outcome in simulation.serve(simulation.caches(most_tokens)):
            window.host_prefix_tokens += outcome.prefix_len
            window.host_chunk_tokens += outcome.num_chunk_hit
            yield None
    if setup.has_store:
        yield from simulation.serve_with_store(most_tokens)
    yield Lasting(
        hours=setup.pace.spread_s / 3600,
        pause_s=setup.pace.pause_s,
        seed=setup.pace.seed,
        sessions=len(sessions),
        servers=setup.servers,
        distinct_tokens=distinct_tokens,
        pool_tokens=pool_tokens,
        host_tokens=host_tokens,
        has_store=setup.has_store,
        window_s=setup.window_s,
        windows=windows,
        warmup_windows=warmup,
        trends=fit_trends(windows[warmup:], setup.window_s),
    )


def fit_trends(windows: Sequence[Window], window_s: float) -> Trends:
    """The trends of windows."""
    served = [window.prefix_tokens + window.chunk_tokens for window in windows]
    unlimited = [window.unlimited_prefix_tokens + window.unlimited_chunk_tokens for window in windows]
    return Trends(
        recovered=fit_trend(
            [window.chunk_tokens for window in windows],
            [window.prompt_tokens - window.prefix_tokens for window in windows],
            window_s,
        ),
        kept=fit_trend(served, unlimited, window_s),
    )


class _Dealt(NamedTuple):
    """A call that goes to a server, by its number."""

    at_s: float
    window: Window
    server: int
    ref: CallRef
    encoded: EncodedCall


@dataclass(slots=True)
class _Simulation:
    """Deals the same calls to the same servers, again for every service."""

    sessions: Sequence[tuple[str, Session]]
    encoder: Encoder
    config: CoreConfig
    setup: Setup
    windows: list[Window]

    def caches(self, num_tokens: int) -> list[Cache]:
        """One for each server."""
        return [Cache(self.config, self.encoder, num_tokens) for _ in range(self.setup.servers)]

    def serve(self, caches: Sequence[Cache]) -> Iterator[tuple[float, Window, Outcome]]:
        """Serve every call by the cache of its server: when, in which window, and what came of it."""
        for at_s, window, server, ref, encoded in self._deal():
            yield at_s, window, caches[server].serve(ref, None, encoded)

    def serve_with_store(self, num_tokens: int) -> Iterator[None]:
        """Serve every call by stock SGLang with a store, then by this cache with another one, and count both."""
        store = Store(self.config, self.encoder.delimiters)
        trees = [PrefixTree(num_tokens) for _ in range(self.setup.servers)]
        for _, window, server, ref, encoded in self._deal():
            tokens, path, tree = encoded.tokens, encoded.path, trees[server]
            end, _ = store.load_end(tokens, tree.resident_len(tokens))
            window.store_stock_tokens += max(0, min(end, len(tokens) - 1))
            store.write(path, max(end, tree.insert(path, ref.number)))
            yield None
        store = Store(self.config, self.encoder.delimiters)
        caches = [StoreCache(self.config, self.encoder, num_tokens, store) for _ in range(self.setup.servers)]
        for _, window, server, ref, encoded in self._deal():
            cache = caches[server]
            loaded_before = cache.num_loaded
            outcome = cache.serve(ref, None, encoded)
            window.store_prefix_tokens += outcome.prefix_len
            window.store_chunk_tokens += outcome.num_chunk_hit
            window.store_loaded_tokens += cache.num_loaded - loaded_before
            yield None

    def _deal(self) -> Iterator[_Dealt]:
        setup = self.setup
        servers = random.Random(f"servers {setup.pace.seed}")
        for number, paced in enumerate(pace_calls(self.sessions, setup.pace)):
            ref = CallRef(number, paced.file, paced.call.session_id, paced.call.index)
            window = _window(self.windows, paced.at_s, setup.window_s)
            yield _Dealt(paced.at_s, window, servers.randrange(setup.servers), ref, self.encoder.encode(paced.call))


def _window(windows: Sequence[Window], at_s: float, window_s: float) -> Window:
    """The window of a moment; calls after the last window are not counted."""
    number = int(at_s / window_s)
    return windows[number] if number < len(windows) else Window()
