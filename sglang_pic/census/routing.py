"""Many servers: what each policy of a router makes them compute, in simulated time.

Each server has the plugin, and a pool that evicts, or one without limit. It computes its prompts one after the other at
`PREFILL_TOKENS_PER_S`; answers take no time. The router learns what a server holds when a prompt is computed.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from pic_traces import Session
from pic_traces.encode.encoded import Encoder
from pic_traces.pace import Pace

from sglang_pic.census.gateway import Computed, Content, Routing, make_policy
from sglang_pic.census.lasting import PacedCall, pace_calls
from sglang_pic.census.outcome import CallRef
from sglang_pic.census.simulate import Cache
from sglang_pic.core import Chunker, CoreConfig, Lexicon, Tokens
from sglang_pic.route import Sketched, cut
from sglang_pic.route.told import Change, ToldNames
from sglang_pic.route.wire import MAX_NAMES

PREFILL_TOKENS_PER_S: Final = 10_000
_NAMESPACE, _SALT = b"census", b"census"


class Fleet(NamedTuple):
    """What is simulated."""

    pace: Pace
    servers: int
    restart_share: float = 0.0
    """Share of the servers that restart and hold nothing, before the second half of the calls."""
    pool_tokens: int | None = None
    """What the pool of each server holds; None for all."""


class IndexCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the router's index costs."""

    names: int
    """Distinct names that servers hold."""
    num_bytes: int
    """Host memory of the index."""
    told_bytes: int
    """Bytes of the messages of all servers, for one listener."""
    route_s: float
    """Processor time of all look-ups and choices, without cutting prompts."""
    cut_s: float
    """Processor time of cutting prompts."""


class Routed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of one policy."""

    routing: str
    """A `Routing`, or `one` for a single server with the pools of all."""
    computed_tokens: int
    second_half_tokens: int
    """Of those the tokens of the second half of the calls."""
    busiest_to_mean: float
    """Computed tokens of the server that computed most, to the mean of all servers."""
    cached_tokens: int
    """Tokens that the servers hold in the end, all together."""
    ttft_p50_s: float
    """Simulated time until a prompt is computed."""
    ttft_p99_s: float
    index: IndexCost | None = None


class Routings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result: what `census --routing --json` prints."""

    hours: float
    pause_s: float
    seed: int
    servers: int
    restart_share: float
    pool_tokens: int | None
    """Tokens that each server holds at most; None without limit."""
    sessions: int
    calls: int
    prompt_tokens: int
    second_half_tokens: int
    """Prompt tokens of the second half of the calls."""
    policies: list[Routed]


def simulate_routing(
    sessions: Sequence[tuple[str, Session]],
    encoder: Encoder,
    config: CoreConfig,
    fleet: Fleet,
    routings: Sequence[Routing],
) -> Iterator[Routings | None]:
    """Serve every call by one server with the pools of all, then as each policy says; the result comes last.

    Args:
        sessions: each with its file.
        encoder: turns calls into token ids.
        config: the servers' settings.
        fleet: pace and servers.
        routings: the policies.

    Yields:
        None for each service.
    """
    calls = list(pace_calls(sessions, fleet.pace))
    served = []
    for routing in (None, *routings):
        run = _Run(calls, encoder, config, fleet, routing)
        yield from run.serve()
        served.append(run)
    yield Routings(
        hours=fleet.pace.spread_s / 3600,
        pause_s=fleet.pace.pause_s,
        seed=fleet.pace.seed,
        servers=fleet.servers,
        restart_share=fleet.restart_share,
        pool_tokens=fleet.pool_tokens,
        sessions=len(sessions),
        calls=len(calls),
        prompt_tokens=served[0].num_tokens,
        second_half_tokens=served[0].second_half_tokens,
        policies=[run.result() for run in served],
    )


class _Server:
    """A server, and what it has to tell."""

    def __init__(self, config: CoreConfig, encoder: Encoder, pool_tokens: int | None, lexicon: Lexicon) -> None:
        self._changes: list[Change] = []
        self._names = ToldNames(_SALT, lambda _: _NAMESPACE)
        self.cache = Cache(config, encoder, pool_tokens, lexicon=lexicon, watch=self._note)

    def tell(self) -> tuple[list[int], list[int]]:
        """The names that it holds since it told last, and those it does not hold any more."""
        self._names.apply(self._changes)
        self._changes.clear()
        return self._names.take(MAX_NAMES)

    def _note(self, namespace: Hashable, name: int, change: int) -> None:
        self._changes.append((namespace, name, change))


class _Run:
    """Serves all calls under one policy; by one server without."""

    def __init__(
        self, calls: Sequence[PacedCall], encoder: Encoder, config: CoreConfig, fleet: Fleet, routing: Routing | None
    ) -> None:
        self._calls, self._encoder, self._config, self._fleet = calls, encoder, config, fleet
        self._routing = routing
        num_servers = fleet.servers if routing else 1
        self._policy = make_policy(routing or Routing.ROUND_ROBIN, num_servers)
        self._chunker, self._lexicon = Chunker(config), Lexicon()
        pool_tokens = fleet.pool_tokens
        self._pool_tokens = pool_tokens if routing or pool_tokens is None else fleet.servers * pool_tokens
        self._servers = [self._server() for _ in range(num_servers)]
        self._computed, self._free_at = [0] * num_servers, [0.0] * num_servers
        self._open: list[Computed] = []
        self._waits: list[float] = []
        self._route_s, self._cut_s = 0.0, 0.0
        self.num_tokens = self.second_half_tokens = self._second_half_computed = 0

    def serve(self) -> Iterator[None]:
        """Serve every call."""
        for number, paced in enumerate(self._calls):
            if number == len(self._calls) // 2 and self._routing:
                self._restart(paced.at_s)
            self._end_until(paced.at_s)
            encoded = self._encoder.encode(paced.call)
            tokens = encoded.tokens
            server = self._choose(tokens, paced.at_s)
            ref = CallRef(number, paced.file, paced.call.session_id, paced.call.index)
            outcome = self._servers[server].cache.serve(ref, None, encoded)
            num_computed = len(tokens) - outcome.prefix_len - outcome.num_chunk_hit
            done_at = max(paced.at_s, self._free_at[server]) + num_computed / PREFILL_TOKENS_PER_S
            self._free_at[server] = done_at
            self._waits.append(done_at - paced.at_s)
            self._computed[server] += num_computed
            self.num_tokens += len(tokens)
            if 2 * number >= len(self._calls):
                self.second_half_tokens += len(tokens)
                self._second_half_computed += num_computed
            told = self._servers[server].tell()
            heapq.heappush(self._open, Computed(done_at, number, server, num_computed, *told))
            yield

    def result(self) -> Routed:
        """What came of it, after `serve`."""
        self._end_until(math.inf)
        p50, p99 = np.percentile(self._waits, [50, 99]).tolist()
        index = None
        if isinstance(self._policy, Content):
            fleet = self._policy.fleet
            index = IndexCost(
                names=len(fleet.balancer.index),
                num_bytes=fleet.balancer.index.num_bytes,
                told_bytes=sum(status.num_bytes for status in fleet.status().values()),
                route_s=self._route_s,
                cut_s=self._cut_s,
            )
        return Routed(
            routing=self._routing.value if self._routing else "one",
            computed_tokens=sum(self._computed),
            second_half_tokens=self._second_half_computed,
            busiest_to_mean=max(self._computed) * len(self._computed) / max(1, sum(self._computed)),
            cached_tokens=sum(server.cache.num_tokens for server in self._servers),
            ttft_p50_s=p50,
            ttft_p99_s=p99,
            index=index,
        )

    def _server(self) -> _Server:
        return _Server(self._config, self._encoder, self._pool_tokens, self._lexicon)

    def _choose(self, tokens: Tokens, at_s: float) -> int:
        begun = time.thread_time()
        sketched = self._cut(tokens)
        cut_at = time.thread_time()
        server = self._policy.choose(tokens, sketched, at_s)
        self._cut_s += cut_at - begun
        self._route_s += time.thread_time() - cut_at
        return server

    def _cut(self, tokens: Tokens) -> Sketched:
        return cut(tokens, _NAMESPACE, _SALT, chunker=self._chunker, delimiters=self._encoder.delimiters)

    def _end_until(self, at_s: float) -> None:
        """Servers tell what they have computed by then."""
        while self._open and self._open[0].at_s <= at_s:
            self._policy.end(heapq.heappop(self._open))

    def _restart(self, at_s: float) -> None:
        """Restart a share of the servers, once what is being computed is done."""
        num_restarts = round(self._fleet.restart_share * len(self._servers))
        if num_restarts:
            self._end_until(math.inf)
        for server in range(num_restarts):
            self._servers[server] = self._server()
            self._policy.restart(server, at_s)
