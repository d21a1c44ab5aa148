"""Does the gain last? Sessions side by side in simulated time, with a pool that holds a share of what they say.

Sessions start at random moments and pause between calls; a call takes no time. Every call is served twice: by a cache
without limit, and by one whose prefix tree evicts as SGLang's does and whose chunk index has the server's bounds. With
a host (HiCache) it is served once more: what left the pool for the host still serves, there as from the pool.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from pic_traces import Session
from pic_traces.encode.encoded import Encoder
from pic_traces.pace import Pace
from pic_traces.session import Call

from sglang_pic.census.outcome import CallRef, Outcome
from sglang_pic.census.simulate import Cache
from sglang_pic.census.trend import Trend, fit_trend
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


class Trends(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Trends over the windows after the warm-up; None where there are too few."""

    recovered: Trend | None
    """chunk / (prompt - prefix): what this cache serves of stock SGLang's misses."""
    kept: Trend | None
    """prefix + chunk of the pool, as a share of the same of a cache without limit."""


class Lasting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result: what `census --hours --json` prints."""

    hours: float
    pause_s: float
    seed: int
    sessions: int
    distinct_tokens: int
    """Tokens that the cache without limit holds in the end: those of distinct paths."""
    pool_tokens: int
    host_tokens: int = 0
    """Tokens that the host holds, those of the pool among them."""
    window_s: float
    windows: list[Window]
    warmup_windows: int
    """Windows up to the first in which the pool was full; 1 where it never was."""
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
        setup: pace, windows and pool.
    """
    pace, window_s, pool_share, host_share = setup
    windows = [Window() for _ in range(round(pace.spread_s / window_s))]

    def serve_all(cache: Cache) -> Iterator[tuple[float, Window, Outcome]]:
        """Serve every call by `cache`: when, in which window, and what came of it."""
        for number, paced in enumerate(pace_calls(sessions, pace)):
            ref = CallRef(number, paced.file, paced.call.session_id, paced.call.index)
            outcome = cache.serve(ref, None, encoder.encode(paced.call))
            yield paced.at_s, _window(windows, paced.at_s, window_s), outcome

    cache = Cache(config, encoder)
    for _, window, outcome in serve_all(cache):
        window.unlimited_prefix_tokens += outcome.prefix_len
        window.unlimited_chunk_tokens += outcome.num_chunk_hit
        yield None
    distinct_tokens = cache.num_tokens
    pool_tokens = max(1, round(pool_share * distinct_tokens))
    cache, warmup = Cache(config, encoder, pool_tokens), 1
    for at_s, window, outcome in serve_all(cache):
        window.calls += 1
        window.prompt_tokens += len(outcome.encoded.tokens)
        window.prefix_tokens += outcome.prefix_len
        window.chunk_tokens += outcome.num_chunk_hit
        if not cache.has_evicted:
            warmup = int(at_s / window_s) + 1
        yield None
    if not cache.has_evicted:
        warmup = 1
    host_tokens = round(host_share * distinct_tokens)
    if host_tokens:
        # SGLang copies what it stores to the host at once, so the host has what the pool has, and more.
        cache = Cache(config, encoder, max(pool_tokens, host_tokens))
        for _, window, outcome in serve_all(cache):
            window.host_prefix_tokens += outcome.prefix_len
            window.host_chunk_tokens += outcome.num_chunk_hit
            yield None
    yield Lasting(
        hours=pace.spread_s / 3600,
        pause_s=pace.pause_s,
        seed=pace.seed,
        sessions=len(sessions),
        distinct_tokens=distinct_tokens,
        pool_tokens=pool_tokens,
        host_tokens=host_tokens,
        window_s=window_s,
        windows=windows,
        warmup_windows=warmup,
        trends=fit_trends(windows[warmup:], window_s),
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


def _window(windows: Sequence[Window], at_s: float, window_s: float) -> Window:
    """The window of a moment; calls after the last window are not counted."""
    number = int(at_s / window_s)
    return windows[number] if number < len(windows) else Window()
