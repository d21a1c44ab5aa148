"""Where a prompt goes: to the server with least to compute until it is done; a busy one's tokens cost more.

Nothing is booked that a lost answer could leave behind: what a server was given counts less with every token that
servers are given, and what its requests wait for with every second.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Final, NamedTuple

from sglang_pic.route.fleet_index import FleetIndex
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

WAITING_HALF_LIFE_S: Final = 2.0
"""Half of what requests wait for is thought to be computed after so long."""


class Route(NamedTuple):
    """Where a prompt goes."""

    server: str
    num_computed: int
    """Tokens that the server is thought to compute."""


class Balancer:
    """Chooses a server for each prompt, and keeps account of what each of them got. Not thread-safe.

    Args:
        index: what servers told.
    """

    def __init__(self, index: FleetIndex) -> None:
        self.index = index
        # Of the servers that prompts may go to: computed tokens that they got, older ones counting less, and those that
        # requests are thought to wait for, at the moment of the last route. Shrink with `leave`.
        self._recent: dict[str, float] = {}
        self._waiting: dict[str, float] = {}
        self._routed_at = 0.0

    @property
    def servers(self) -> list[str]:
        """Those that prompts may go to, in the order in which they joined."""
        return list(self._recent)

    def waiting(self, server: str, now: float) -> float:
        """Tokens that a server's requests are thought to wait for."""
        return self._waiting.get(server, 0.0) * 0.5 ** ((now - self._routed_at) / WAITING_HALF_LIFE_S)

    def join(self, server: str) -> None:
        """A server is there, also again. It counts as busy as the average, or all would go there at first."""
        for got in (self._recent, self._waiting):
            got.setdefault(server, fmean(got.values()) if got else 0.0)

    def leave(self, server: str) -> None:
        """A server is gone."""
        for got in (self._recent, self._waiting):
            got.pop(server, None)

    def route(self, sketched: Sketched, now: float) -> Route | None:
        """Choose a server for a prompt; None where there is none. Of equal ones the one that got least, then the first.

        Cost: a look-up in the index, and O(servers).
        """
        if not self._recent:
            return None
        self._waiting = {server: self.waiting(server, now) for server in self._waiting}
        self._routed_at = now
        held = self.index.held(sketched)
        most = sketched.num_tokens + 1 + int(_LEAST_SHARE * sketched.num_tokens)
        mean = fmean(self._recent.values()) + _IDLE_TOKENS

        def cost(server: str) -> tuple[float, float]:
            share = (self._recent[server] + _IDLE_TOKENS) / mean
            price = math.exp(min(_MAX_EXPONENT, _STEEPNESS * (share - 1)))
            return (most - held.get(server, 0)) * price + _WAIT_COST * self._waiting[server], self._recent[server]

        server = min(self._recent, key=cost)
        route = Route(server, most - held.get(server, 0))
        aged = 0.5 ** (route.num_computed / (HALF_LIFE_TOKENS * len(self._recent)))
        self._recent = {server: got * aged for server, got in self._recent.items()}
        self._recent[server] += route.num_computed
        self._waiting[server] += route.num_computed
        return route
