"""Hits by the size of the KV pool: pools of several sizes serve the same calls, each with an LRU tree of its own.

One pass over stack distances cannot count splices: where a pool has lost a prefix, its text is spliced from another
copy, and the copy that is computed again becomes a donor. So each pool is simulated. As in SGLang a match touches its
whole path, and whole leaves are evicted. Calls come one at a time, so no running request locks rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
from pic_traces.encode.encoded import Encoder

from sglang_pic.census.outcome import Outcome
from sglang_pic.census.simulate import Cache
from sglang_pic.core import CoreConfig

KNEE = 0.9
"""The share of an unlimited cache's hits that a pool must have to be large enough."""
_SIZES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2)
"""Of the pools that are counted, in those asked for; each is twice the one before, as SGLang's `--hicache-ratio`."""


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompt tokens by their source, in a KV pool of so many tokens; the rest is computed."""

    tokens: int | None
    """None for an unlimited pool."""
    prefix_tokens: int
    chunk_tokens: int
    host_tokens: int | None = None
    """Further hits with HiCache and rows for twice the pool on the host; None where that was not counted."""
    refused_calls: int = 0
    """Calls that the pool cannot hold: a server refuses them. They count as computed."""

    @property
    def hits(self) -> int:
        """Prefix hits and spliced tokens."""
        return self.prefix_tokens + self.chunk_tokens


class Pools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hits by pool size, over all files with text."""

    prompt_tokens: int
    side_by_side: int
    """Sessions that took turns."""
    session_tokens: float
    """A session's longest prompt, mean over sessions."""
    pools: list[Pool]
    """Ascending, the unlimited one last."""

    @property
    def knee(self) -> float | None:
        """The smallest pool with `KNEE` of an unlimited cache's hits, between those counted; None if it is not."""
        wanted = KNEE * self.pools[-1].hits
        counted = [(pool.tokens, pool.hits) for pool in self.pools if pool.tokens is not None]
        for (low, fewer), (high, more) in pairwise(counted):
            if fewer < wanted <= more:
                return low * (high / low) ** ((wanted - fewer) / (more - fewer))
        return None


@dataclass(slots=True)
class _Counts:
    prefix: int = 0
    chunk: int = 0
    refused: int = 0


@dataclass(slots=True)
class PoolCensus:
    """Serves calls from pools of several sizes.

    Args:
        pool: tokens of the pool that was asked for.
        config: the server's settings.
        encoder: made the calls' tokens.
        side_by_side: sessions that take turns.
    """

    pool: int
    config: CoreConfig
    encoder: Encoder
    side_by_side: int
    _caches: dict[int, Cache] = field(default_factory=dict)
    _counts: dict[int, _Counts] = field(default_factory=dict)
    _unlimited: _Counts = field(default_factory=_Counts)
    _num_prompt: int = 0
    _longest: dict[tuple[str, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._counts = {size: _Counts() for by in _SIZES if (size := int(by * self.pool))}
        self.begin_cache()

    def begin_cache(self) -> None:
        """Continue with empty caches."""
        self._caches = {size: Cache(self.config, self.encoder, pool=size) for size in self._counts}

    def observe(self, outcome: Outcome) -> None:
        """Serve one call, which an unlimited cache has served so."""
        encoded, num_prompt = outcome.encoded, len(outcome.encoded.tokens)
        for size, cache in self._caches.items():
            counts = self._counts[size]
            if len(encoded.path) > size:
                counts.refused += 1
            else:
                served = cache.serve(outcome.ref, outcome.agent, encoded)
                counts.prefix += served.prefix_len
                counts.chunk += served.num_chunk_hit
        self._unlimited.prefix += outcome.prefix_len
        self._unlimited.chunk += outcome.num_chunk_hit
        self._num_prompt += num_prompt
        session = outcome.ref.file, outcome.ref.session
        self._longest[session] = max(self._longest.get(session, 0), num_prompt)

    def result(self) -> Pools | None:
        """The counts, but of smaller pools that refused calls; None before the first call."""
        if not self._longest:
            return None
        hits = {size: counts.prefix + counts.chunk for size, counts in self._counts.items()}
        pools = [
            Pool(
                tokens=size,
                prefix_tokens=counts.prefix,
                chunk_tokens=counts.chunk,
                host_tokens=max(0, hits[2 * size] - hits[size]) if 2 * size in hits else None,
                refused_calls=counts.refused,
            )
            for size, counts in self._counts.items()
            if size >= self.pool or not counts.refused
        ]
        pools.append(Pool(tokens=None, prefix_tokens=self._unlimited.prefix, chunk_tokens=self._unlimited.chunk))
        return Pools(
            prompt_tokens=self._num_prompt,
            side_by_side=self.side_by_side,
            session_tokens=sum(self._longest.values()) / len(self._longest),
            pools=pools,
        )
