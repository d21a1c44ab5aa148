"""The policies that a census of many servers compares: ours, and those of SGLang's gateway.

`cache_aware` follows the documented behaviour of `sglang-router` 0.3 with its default thresholds, over tokens where the
gateway has characters. Its trees are not evicted, which the gateway begins with at 67 million characters a server.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from enum import Enum
from typing import Final, NamedTuple, Protocol

from sglang_pic.core import CoreConfig, Tokens
from sglang_pic.core.trie import Node, Trie
from sglang_pic.route import Route, Sketched
from sglang_pic.route.fleet import Fleet
from sglang_pic.route.wire import Cutting, Told, encode, pack

HEADER_TOKENS: Final = 512
"""Token ids that the gateway `smg` takes in the header `X-SMG-Routing-Tokens`."""

_CACHE_THRESHOLD: Final = 0.3
_BALANCE_ABS_THRESHOLD: Final = 64
_BALANCE_REL_THRESHOLD: Final = 1.5
_CUTTING: Final = Cutting.of(CoreConfig(), ())


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


class Computed(NamedTuple):
    """A prompt that is computed; the server tells which names it holds since, and which no longer."""

    at_s: float
    number: int
    """Counts the prompts that were chosen for, from 0."""
    server: int
    num_computed: int
    held: list[int]
    gone: list[int]


class Policy(Protocol):
    """Chooses servers, by their numbers."""

    def choose(self, tokens: Tokens, sketched: Sketched, at_s: float) -> int:
        """The server for a prompt, which is sent there."""

    def end(self, computed: Computed) -> None:
        """A prompt is computed."""

    def restart(self, server: int, at_s: float) -> None:
        """A server holds nothing any more; it computes nothing at that moment."""


class RoundRobin(NamedTuple):
    """One after the other."""

    numbers: itertools.cycle[int]

    def choose(self, tokens: Tokens, sketched: Sketched, at_s: float) -> int:
        """The next server."""
        del tokens, sketched, at_s
        return next(self.numbers)

    def end(self, computed: Computed) -> None:
        """Nothing is kept."""

    def restart(self, server: int, at_s: float) -> None:
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

    def choose(self, tokens: Tokens, sketched: Sketched, at_s: float) -> int:
        """As the class says."""
        del sketched, at_s
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

    def end(self, computed: Computed) -> None:
        """The server has one request less."""
        self._open[computed.server] -= 1

    def restart(self, server: int, at_s: float) -> None:
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

    def choose(self, tokens: Tokens, sketched: Sketched, at_s: float) -> int:
        """As `CacheAware`, for what follows the first chunk that was seen before."""
        names = sketched.names.tolist()
        known = next((number for number, name in enumerate(names) if name in self._seen), None)
        self._seen.update(names)
        start = 0 if known is None else int(sketched.ends[known])
        return super().choose(tokens[start : start + HEADER_TOKENS], sketched, at_s)


class Content:
    """Ours, told by messages as by real servers."""

    def __init__(self, num_servers: int) -> None:
        self.fleet = Fleet(map(str, range(num_servers)))
        # By server: its restarts, and its messages since.
        self._runs, self._numbers = [-1] * num_servers, [0] * num_servers
        # Of prompts that are not computed; shrinks with `end`.
        self._routes: dict[int, Route] = {}
        for server in range(num_servers):
            self.restart(server, 0.0)

    def choose(self, tokens: Tokens, sketched: Sketched, at_s: float) -> int:
        """As `Fleet.route`; the text counts as held before the server says so."""
        self.fleet.expire(at_s)
        route = self.fleet.route(sketched)
        assert route is not None, "there are servers"
        self._routes[route.number] = route
        self.fleet.assume(str(route.server), sketched.names, at_s)
        return int(str(route.server))

    def end(self, computed: Computed) -> None:
        """What the server really computed, and what it tells."""
        self.fleet.balancer.end(self._routes.pop(computed.number), computed.num_computed)
        self._tell(computed.server, computed.at_s, held=pack(computed.held), gone=pack(computed.gone))

    def restart(self, server: int, at_s: float) -> None:
        """The server leaves and joins again."""
        self.fleet.balancer.leave(str(server))
        self._runs[server] += 1
        self._numbers[server] = 0
        self._tell(server, at_s, begins=_CUTTING)

    def _tell(
        self, server: int, at_s: float, *, begins: Cutting | None = None, held: bytes = b"", gone: bytes = b""
    ) -> None:
        number, self._numbers[server] = self._numbers[server], self._numbers[server] + 1
        told = Told(run=self._runs[server], number=number, begins=begins, held=held, gone=gone)
        taken = self.fleet.take(str(server), encode(told), at_s)
        assert taken, "no message is lost"


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
