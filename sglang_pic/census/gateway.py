"""The policies that a census of many servers compares: ours, and those of SGLang's gateway.

`cache_aware` follows the documented behaviour of `sglang-router` 0.3 with its default thresholds, over tokens where the
gateway has characters. Its trees are not evicted, which the gateway begins with at 67 million characters a server.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from enum import Enum
from typing import Final, NamedTuple, Protocol

from sglang_pic.core import Tokens
from sglang_pic.core.trie import Node, Trie
from sglang_pic.route import Balancer, FleetIndex, Names, Route, Sketched

HEADER_TOKENS: Final = 512
"""Token ids that the gateway `smg` takes in the header `X-SMG-Routing-Tokens`."""

_CACHE_THRESHOLD: Final = 0.3
_BALANCE_ABS_THRESHOLD: Final = 64
_BALANCE_REL_THRESHOLD: Final = 1.5


class Routing(Enum):
    """Who chooses the server of a call."""

    CONTENT = "content"
    """`sglang_pic.route`: the server with the least to compute until the prompt is done."""
    CACHE_AWARE = "cache_aware"
    """The gateway's: the server that was sent the longest equal prefix, if it is long enough."""
    BEHIND_HEAD = "behind_head"
    """The gateway's cache_aware, given tokens that stand for the prompt: `HEADER_TOKENS` from where text begins that a
    prompt had before."""
    ROUND_ROBIN = "round_robin"
    """The gateway's: one after the other."""


class Policy(Protocol):
    """Chooses servers, by their numbers."""

    def choose(self, tokens: Tokens, sketched: Sketched) -> int:
        """The server for a prompt, which is sent there."""

    def end(self, number: int, server: int, num_computed: int, names: Names) -> None:
        """The prompt that was chosen for as the `number`th, from 0, is computed; the server tells what it holds.

        Args:
            names: what the server tells of the chunks of the prompt and its answer.
        """

    def restart(self, server: int) -> None:
        """A server holds nothing any more; it computes nothing at that moment."""


class RoundRobin(NamedTuple):
    """One after the other."""

    numbers: itertools.cycle[int]

    def choose(self, tokens: Tokens, sketched: Sketched) -> int:
        """The next server."""
        del tokens, sketched
        return next(self.numbers)

    def end(self, number: int, server: int, num_computed: int, names: Names) -> None:
        """Nothing is kept."""

    def restart(self, server: int) -> None:
        """Nothing is kept."""


class CacheAware:
    """The gateway's: of the servers that were sent the longest equal prefix the first one.

    Where that is not long enough the server with the smallest tree; where the requests that are not done are spread too
    unevenly the one with fewest.
    """

    def __init__(self, num_servers: int) -> None:
        self._trie = Trie(None, OrderedDict(), itertools.count())
        # By a node's serial, which counts from 0: the servers that were sent the text up to it, in that order.
        self._sent: list[list[int]] = []
        self._sizes = [0] * num_servers
        self._open = [0] * num_servers

    def choose(self, tokens: Tokens, sketched: Sketched) -> int:
        """As the class says."""
        del sketched
        most, fewest = max(self._open), min(self._open)
        node, stored = self._trie.walk(tokens)
        if most - fewest > _BALANCE_ABS_THRESHOLD and most > _BALANCE_REL_THRESHOLD * fewest:
            server = self._open.index(fewest)
        elif stored > _CACHE_THRESHOLD * len(tokens):
            server = self._sent[node.serial][0]
        else:
            server = self._sizes.index(min(self._sizes))
        self._insert(tokens, node, stored, server)
        self._open[server] += 1
        return server

    def end(self, number: int, server: int, num_computed: int, names: Names) -> None:
        """The server has one request less."""
        self._open[server] -= 1

    def restart(self, server: int) -> None:
        """The gateway does not know what a server lost."""

    def _insert(self, tokens: Tokens, node: Node, stored: int, server: int) -> None:
        if stored < node.end:
            self._trie.split(node, stored)
            self._sent.append(list(self._sent[node.serial]))
        if stored < len(tokens):
            node = self._trie.append(node, tokens[stored:])
            self._sent.append([])
        for each in node.lineage():
            if server not in self._sent[each.serial]:
                self._sent[each.serial].append(server)
                self._sizes[server] += len(each.tokens)


class BehindHead(CacheAware):
    """`CacheAware` for the tokens behind a prompt's volatile head, as a gateway gets them that knows no content."""

    def __init__(self, num_servers: int) -> None:
        super().__init__(num_servers)
        # All names of all prompts.
        self._seen: set[int] = set()

    def choose(self, tokens: Tokens, sketched: Sketched) -> int:
        """As `CacheAware`, for what follows the first chunk that was seen before."""
        names = sketched.names.tolist()
        known = next((number for number, name in enumerate(names) if name in self._seen), None)
        self._seen.update(names)
        start = 0 if known is None else int(sketched.ends[known])
        return super().choose(tokens[start : start + HEADER_TOKENS], sketched)


class Content:
    """Ours."""

    def __init__(self, num_servers: int) -> None:
        self.index = FleetIndex()
        self._balancer = Balancer(self.index)
        for server in range(num_servers):
            self._balancer.join(server)
        # Of prompts that are not computed; shrinks with `end`.
        self._routes: dict[int, Route] = {}

    def choose(self, tokens: Tokens, sketched: Sketched) -> int:
        """As `Balancer.route`."""
        route = self._balancer.route(sketched)
        assert route is not None, "there are servers"
        self._routes[route.number] = route
        assert isinstance(route.server, int), "servers are numbers here"
        return route.server

    def end(self, number: int, server: int, num_computed: int, names: Names) -> None:
        """What the server really computed, and what it tells."""
        self._balancer.end(self._routes.pop(number), num_computed)
        self.index.add(server, names)

    def restart(self, server: int) -> None:
        """The server leaves and joins again."""
        self._balancer.leave(server)
        self._balancer.join(server)


def make_policy(routing: Routing, num_servers: int) -> Policy:
    """A policy for servers that hold nothing."""
    match routing:
        case Routing.CONTENT:
            return Content(num_servers)
        case Routing.CACHE_AWARE:
            return CacheAware(num_servers)
        case Routing.BEHIND_HEAD:
            return BehindHead(num_servers)
        case Routing.ROUND_ROBIN:
            return RoundRobin(itertools.cycle(range(num_servers)))
