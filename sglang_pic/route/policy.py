"""Where a prompt goes: to the server that is done with it first, as long as no server computes much more than others.

Deterministic: neither clocks nor chance; time is what was routed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final, NamedTuple

from sglang_pic.route.index import FleetIndex, Server
from sglang_pic.route.sketch import Sketched

MOST_OF_MEAN: Final = 1.25
"""The busiest server gets at most so many times what servers get on average."""

HALF_LIFE_TOKENS: Final = 200_000
"""What a server got counts half after servers got so many computed tokens more, each."""


class Route(NamedTuple):
    """Where a prompt goes; the receipt that `end` takes back."""

    server: Server
    num_computed: int
    """Tokens that the server is thought to compute."""
    number: int
    """Counts routes."""


@dataclass(slots=True)
class _Load:
    outstanding: int = 0
    """Computed tokens of requests that have not ended."""
    recent: float = 0.0
    """Computed tokens of all requests, older ones counting less."""


class Balancer:
    """Chooses a server for each prompt, and keeps account of what each of them has to compute.

    Args:
        index: what servers told; forgets a server that leaves.
        most_of_mean: the busiest server gets at most so many times what servers get on average.
    """

    def __init__(self, index: FleetIndex, *, most_of_mean: float = MOST_OF_MEAN) -> None:
        self.index = index
        self._most_of_mean = most_of_mean
        # Shrinks with `leave`.
        self._loads: dict[Server, _Load] = {}
        # The requests that have not ended; shrinks with `end` and `leave`.
        self._open: dict[int, Route] = {}
        self._routes = itertools.count()

    @property
    def servers(self) -> list[Server]:
        """Those that prompts may go to."""
        return list(self._loads)

    def outstanding(self, server: Server) -> int:
        """Computed tokens of a server's requests that have not ended."""
        return self._loads[server].outstanding

    def join(self, server: Server) -> None:
        """A server is there, also again. It counts as busy as the average, or all would go there at first."""
        if server not in self._loads:
            loads = self._loads.values()
            self._loads[server] = _Load(recent=sum(load.recent for load in loads) / len(loads) if loads else 0.0)

    def leave(self, server: Server) -> None:
        """A server is gone; what it held is forgotten, and `end` of its requests does nothing."""
        self.index.forget(server)
        if self._loads.pop(server, None) is not None:
            for number in [each.number for each in self._open.values() if each.server == server]:
                del self._open[number]

    def route(self, sketched: Sketched) -> Route | None:
        """Choose a server for a prompt; None where there is none.

        Of the servers that stay within their share of what is computed, the one with the least to compute until the
        prompt is done; of equal ones the one that got least, then the one that joined first.
        """
        if not self._loads:
            return None
        held = self.index.held(sketched)
        costs = {server: max(1, sketched.num_tokens - held.get(server, 0)) for server in self._loads}
        total = sum(load.recent for load in self._loads.values())
        least = min(load.recent for load in self._loads.values())

        def within_share(server: Server) -> bool:
            recent, cost = self._loads[server].recent, costs[server]
            most = self._most_of_mean * (total + cost) / len(self._loads)
            return recent <= least or recent + cost <= most

        server = min(
            filter(within_share, self._loads),
            key=lambda each: (self._loads[each].outstanding + costs[each], self._loads[each].recent),
        )
        route = Route(server, costs[server], next(self._routes))
        load = self._loads[server]
        load.outstanding += route.num_computed
        load.recent += route.num_computed
        self._fade(route.num_computed)
        self._open[route.number] = route
        return route

    def end(self, route: Route, num_computed: int | None = None) -> None:
        """A request has ended, whatever came of it; a second time does nothing.

        Args:
            route: what `route` returned.
            num_computed: tokens that the server really computed of the prompt, if it told.
        """
        if self._open.pop(route.number, None) is None:
            return
        load = self._loads[route.server]
        load.outstanding -= route.num_computed
        if num_computed is not None:
            load.recent = max(0.0, load.recent + num_computed - route.num_computed)

    def _fade(self, num_computed: int) -> None:
        """Let what was before count less."""
        kept = 0.5 ** (num_computed / (HALF_LIFE_TOKENS * len(self._loads)))
        for load in self._loads.values():
            load.recent *= kept
