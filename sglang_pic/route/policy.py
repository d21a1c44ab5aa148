"""Where a prompt goes: to the server with least to compute until it is done; a busy one's tokens cost more.

Deterministic: neither clocks nor chance; time is what servers computed.
"""

from __future__ import annotations

import itertools
from typing import Final, NamedTuple

import numpy as np

from sglang_pic.route.index import FleetIndex, Server
from sglang_pic.route.sketch import Sketched

# A token costs exp(STEEPNESS * (x - 1)) on a server that got x times what servers get on average. A flatter price
# computes less and spreads less. Both numbers were swept in simulations of 8 servers on OpenDevin and the generator
# `tool_aging`.
_STEEPNESS: Final = 4.0
_IDLE_TOKENS: Final = 16_000
"""Added to what each server got: less is no sign of being busy."""
_LEAST_SHARE: Final = 0.03
"""A server that holds all of a prompt is thought to compute this share: busy servers cost more for it, too."""
_WAIT_COST: Final = 0.5
"""What a token that others wait for on a server costs: it delays the prompt, but is computed in any case."""
_MAX_EXPONENT: Final = 50.0

HALF_LIFE_TOKENS: Final = 200_000
"""What a server got counts half after servers got so many computed tokens more, each."""


class Route(NamedTuple):
    """Where a prompt goes; the receipt that `end` takes back."""

    server: Server
    num_computed: int
    """Tokens that the server is thought to compute."""
    number: int
    """Counts routes."""


class Balancer:
    """Chooses a server for each prompt, and keeps account of what each of them has to compute. Not thread-safe.

    Args:
        index: what servers told; forgets a server that leaves.
    """

    def __init__(self, index: FleetIndex) -> None:
        self.index = index
        # By a server's place: computed tokens of its requests that have not ended, and of all, older ones counting
        # less. Shrink with `leave`.
        self._places: dict[Server, int] = {}
        self._outstanding = np.zeros(0, dtype=np.int64)
        self._recent = np.zeros(0)
        # The requests that have not ended; shrinks with `end` and `leave`.
        self._open: dict[int, Route] = {}
        self._numbers = itertools.count()

    @property
    def servers(self) -> list[Server]:
        """Those that prompts may go to, in the order in which they joined."""
        return list(self._places)

    def outstanding(self, server: Server) -> int:
        """Computed tokens of a server's requests that have not ended."""
        return int(self._outstanding[self._places[server]])

    def join(self, server: Server) -> None:
        """A server is there, also again. It counts as busy as the average, or all would go there at first."""
        if server not in self._places:
            self._places[server] = len(self._places)
            self._outstanding = np.append(self._outstanding, 0)
            self._recent = np.append(self._recent, self._recent.mean() if len(self._recent) else 0.0)

    def leave(self, server: Server) -> None:
        """A server is gone; what it held is forgotten, and `end` of its requests does nothing."""
        self.index.forget(server)
        place = self._places.pop(server, None)
        if place is None:
            return
        self._places = {other: number for number, other in enumerate(self._places)}
        self._outstanding = np.delete(self._outstanding, place)
        self._recent = np.delete(self._recent, place)
        self._open = {number: route for number, route in self._open.items() if route.server != server}

    def route(self, sketched: Sketched) -> Route | None:
        """Choose a server for a prompt; None where there is none. Of equal ones the one that got least, then the first.

        Cost: a look-up in the index, and O(servers).
        """
        if not self._places:
            return None
        costs = np.full(len(self._places), sketched.num_tokens, dtype=np.int64)
        for server, num_held in self.index.held(sketched).items():
            if (place := self._places.get(server)) is not None:
                costs[place] -= num_held
        costs += 1 + int(_LEAST_SHARE * sketched.num_tokens)
        got = self._recent + _IDLE_TOKENS
        prices = np.exp(np.minimum(_MAX_EXPONENT, _STEEPNESS * (got / got.mean() - 1)))
        place = int(np.lexsort((self._recent, costs * prices + _WAIT_COST * self._outstanding))[0])
        route = Route(self.servers[place], int(costs[place]), next(self._numbers))
        self._outstanding[place] += route.num_computed
        self._recent *= 0.5 ** (route.num_computed / (HALF_LIFE_TOKENS * len(self._places)))
        self._recent[place] += route.num_computed
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
        place = self._places[route.server]
        self._outstanding[place] -= route.num_computed
        if num_computed is not None:
            self._recent[place] = max(0.0, self._recent[place] + num_computed - route.num_computed)
