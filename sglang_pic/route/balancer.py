"""Chooses the server that has least to compute for a prompt; tokens of busy servers cost more.

It does not depend on answers, which may be lost: a server's past work counts less with every later token of any server,
and its waiting tokens with every second.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Final, NamedTuple

from sglang_pic.route.fleet_index import FleetIndex
from sglang_pic.route.sketch import Sketched

# A token costs exp(STEEPNESS * (x - 1)) on a server that got x times the average work. A lower steepness computes less
# and balances less. Both numbers were swept in simulations of 8 servers on OpenDevin and the generator `tool_aging`.
_STEEPNESS: Final = 4.0
_IDLE_TOKENS: Final = 16_000
"""Added to the work of each server: less work does not make a server busy."""
_LEAST_SHARE: Final = 0.03
"""Least share of a prompt that a server is estimated to compute, so that busy servers always cost more."""
_WAIT_COST: Final = 0.5
"""Cost of a waiting token of a server: it delays the prompt, but is computed in any case."""
_MAX_EXPONENT: Final = 50.0

HALF_LIFE_TOKENS: Final = 200_000
"""Past work counts half after so many further computed tokens per server."""

WAITING_HALF_LIFE_S: Final = 2.0
"""Half of the waiting tokens are estimated to be computed after so long."""


class Route(NamedTuple):
    """The server chosen for a prompt."""

    server: str
    num_computed: int
    """Estimated tokens that it computes."""


class Balancer:
    """Chooses a server for each prompt, and records the work of each. Not thread-safe.

    Args:
        index: the names that servers announced.
    """

    def __init__(self, index: FleetIndex) -> None:
        self.index = index
        # For each available server its computed tokens, older ones counting less, and its estimated waiting tokens at
        # the last route. Shrink with `leave`.
        self._recent: dict[str, float] = {}
        self._waiting: dict[str, float] = {}
        self._routed_at = 0.0

    @property
    def servers(self) -> list[str]:
        """The available servers, in the order in which they joined."""
        return list(self._recent)

    def waiting(self, server: str, now: float) -> float:
        """Estimated waiting tokens of a server."""
        return self._waiting.get(server, 0.0) * 0.5 ** ((now - self._routed_at) / WAITING_HALF_LIFE_S)

    def join(self, server: str) -> None:
        """Add a server, with average work, so that not all prompts go there at first."""
        for got in (self._recent, self._waiting):
            got.setdefault(server, fmean(got.values()) if got else 0.0)

    def leave(self, server: str) -> None:
        """Remove a server."""
        for got in (self._recent, self._waiting):
            got.pop(server, None)

    def route(self, sketched: Sketched, now: float) -> Route | None:
        """Choose a server for a prompt; among equals the one with least work, then the first; None if there is none.

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
