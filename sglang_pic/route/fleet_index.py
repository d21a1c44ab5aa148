"""The servers that have announced each chunk: a dictionary from names to sets of servers, as bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from sglang_pic.core import ReusePolicy
from sglang_pic.route.sketch import Sketched

MAX_NAMES_PER_SERVER: Final = 1 << 20
"""Most names of one server; ten times those of a server's chunk index by default."""

# Estimated share of the equal text after a prompt's first difference that a server computes nevertheless: text that may
# depend on a changed field, and rows of too high a generation, which names do not show. Swept in simulations of 8
# servers on OpenDevin and the generator `tool_aging`.
_COMPUTED_ANYWAY = 0.5


class FleetIndex:
    """Names and their servers. Shrinks with `remove` and `forget`. Not thread-safe.

    Args:
        policy: the servers' reuse policy.
        max_names_per_server: further names of a server are ignored.
    """

    def __init__(self, policy: ReusePolicy | None = None, *, max_names_per_server: int = MAX_NAMES_PER_SERVER) -> None:
        self._policy = policy or ReusePolicy()
        self._max_names = max_names_per_server
        self._masks: dict[int, int] = {}
        # The bit of every server with names, and how many names it has; `forget` frees it.
        self._places: dict[str, int] = {}
        self._num_held: dict[str, int] = {}

    def __len__(self) -> int:
        """Names of all servers."""
        return len(self._masks)

    def num_names(self, server: str) -> int:
        """Names of a server."""
        return self._num_held.get(server, 0)

    def add(self, server: str, names: Iterable[int]) -> list[int]:
        """Add names of a server; returns those that are new for it. Cost O(names)."""
        if server not in self._places:
            taken = set(self._places.values())
            self._places[server] = next(each for each in range(len(taken) + 1) if each not in taken)
        bit = 1 << self._places[server]
        fresh: list[int] = []
        room = self._max_names - self.num_names(server)
        for name in names:
            mask = self._masks.get(name, 0)
            if not mask & bit and len(fresh) < room:
                self._masks[name] = mask | bit
                fresh.append(name)
        self._num_held[server] = self.num_names(server) + len(fresh)
        return fresh

    def remove(self, server: str, names: Iterable[int]) -> None:
        """Remove names of a server, if it has them. Cost O(names)."""
        if server not in self._places:
            return
        bit = 1 << self._places[server]
        for name in names:
            mask = self._masks.get(name, 0)
            if mask & bit:
                self._num_held[server] -= 1
                if mask == bit:
                    del self._masks[name]
                else:
                    self._masks[name] = mask ^ bit

    def forget(self, server: str) -> None:
        """Remove a server with all its names. Cost O(all names)."""
        self.remove(server, list(self._masks))
        self._places.pop(server, None)
        self._num_held.pop(server, None)

    def held(self, sketched: Sketched) -> dict[str, int]:
        """Estimate how many tokens of a prompt each server would reuse; without servers that reuse none.

        As on a server, an equal prefix is reused whole; another equal span without its seam and the prompt's tail, if
        it is long enough before and after that, and only in part.
        """
        masks = [self._masks.get(name, 0) for name in sketched.names.tolist()]
        begun: dict[int, int] = {}
        served: dict[int, int] = {}
        start, before = 0, 0
        for mask, end in zip([*masks, 0], [*sketched.ends.tolist(), sketched.num_tokens], strict=True):
            for place in _places(before & ~mask):
                served[place] = served.get(place, 0) + self._served(begun[place], start, sketched.num_tokens)
            for place in _places(mask & ~before):
                begun[place] = start
            start, before = end, mask
        return {server: served[place] for server, place in self._places.items() if served.get(place)}

    def _served(self, start: int, end: int, num_tokens: int) -> int:
        """Estimated tokens reused of the equal span `[start, end)` of a prompt."""
        policy = self._policy
        if start == 0:
            return end
        spliced = min(end, num_tokens - policy.tail_tokens) - start - policy.seam_tokens
        is_long = end - start >= policy.min_run_tokens and spliced >= policy.min_spliced_tokens
        return int((1 - _COMPUTED_ANYWAY) * spliced) if is_long else 0


def _places(mask: int) -> Iterator[int]:
    """The places of a mask's bits."""
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1
