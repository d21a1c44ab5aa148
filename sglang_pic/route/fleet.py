"""The router's side: what each server told, and which of them are there.

A server that says nothing, lies or speaks another version is left out or costs hits; nothing here fails a request.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from sglang_pic.route.index import FleetIndex
from sglang_pic.route.policy import Balancer, Route
from sglang_pic.route.sketch import Names, Sketched
from sglang_pic.route.wire import SILENT_S, Cutting, Told, decode, unpack

ASSUMED_S: Final = 60.0
"""A server that gets a prompt is thought to hold its text for so long; by then it has told so itself."""


@dataclass(slots=True)
class _Heard:
    """What was heard of one server."""

    run: int = 0
    next_number: int = -1
    at: float = -math.inf
    num_messages: int = 0
    num_bytes: int = 0
    num_gaps: int = 0
    error: str = ""
    assumed: dict[int, float] = field(default_factory=dict)
    """Names that it has not told yet, and until when they count, oldest first; shrinks with time, or when it tells."""


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One server in `/status`."""

    is_there: bool
    """Whether prompts are routed to it."""
    num_names: int
    """Chunks that it is known to hold."""
    outstanding_tokens: int
    """Tokens that it is thought to have to compute for requests that have not ended."""
    num_messages: int
    num_bytes: int
    """Of content events."""
    num_gaps: int
    """How often messages were missing, and everything was asked for anew."""
    error: str
    """Why what it tells is of no use; empty where it is."""


class Fleet:
    """What all servers told. Not thread-safe.

    Args:
        servers: their addresses, as the gateway has them.
        on_new: called with a server and the names of chunks that it did not hold before.
    """

    def __init__(self, servers: Iterable[str], on_new: Callable[[str, list[int]], None] | None = None) -> None:
        self._on_new = on_new
        self._heard = {server: _Heard() for server in servers}
        self.balancer = Balancer(FleetIndex())
        self.cutting: Cutting | None = None
        """How the servers that are there cut; None where none is."""

    def take(self, server: str, data: bytes, now: float) -> bool:
        """Take a message of a server; False where one is missing and the server has to tell everything anew.

        Args:
            server: one of those that this was made with.
            data: the message.
            now: `time.monotonic()`.
        """
        heard = self._heard[server]
        heard.num_messages += 1
        heard.num_bytes += len(data)
        try:
            told = decode(data)
            heard.error = ""
        except (ValueError, msgspec.DecodeError) as error:
            self._give_up(server, f"not a message: {error}")
            return True
        heard.at = now
        if told.begins is not None:
            return self._begin(server, heard, told, told.begins)
        if (told.run, told.number) != (heard.run, heard.next_number):
            if told.run != heard.run:
                self._forget(server)
            heard.num_gaps += heard.next_number >= 0
            heard.next_number = -1
            return False
        self._apply(server, heard, told)
        return True

    def assume(self, server: str, names: Names, now: float) -> None:
        """Take a server that gets a prompt with these names for one that holds them, before it says so.

        The next call of a session comes sooner than content events do.
        """
        heard = self._heard.get(server)
        if heard is None or server not in self.balancer.servers:
            return
        fresh = self.balancer.index.missing(server, names)
        self.balancer.index.add(server, fresh)
        heard.assumed.update(dict.fromkeys(fresh.tolist(), now + ASSUMED_S))

    def leave_silent(self, now: float) -> None:
        """Leave out servers that have been silent."""
        for server, heard in self._heard.items():
            if now - heard.at > SILENT_S:
                self._leave(server)

    def expire(self, now: float) -> None:
        """Leave out what servers were thought to hold and never told."""
        for server, heard in self._heard.items():
            late = [name for name, _ in itertools.takewhile(lambda each: each[1] < now, heard.assumed.items())]
            if late:
                self.balancer.index.remove(server, late)
                for name in late:
                    del heard.assumed[name]

    def route(self, sketched: Sketched) -> Route | None:
        """As `Balancer.route`."""
        return self.balancer.route(sketched)

    def status(self) -> dict[str, ServerStatus]:
        """What is known of each server."""
        there = set(self.balancer.servers)
        return {
            server: ServerStatus(
                is_there=server in there,
                num_names=self.balancer.index.num_names(server),
                outstanding_tokens=self.balancer.outstanding(server) if server in there else 0,
                num_messages=heard.num_messages,
                num_bytes=heard.num_bytes,
                num_gaps=heard.num_gaps,
                error=heard.error,
            )
            for server, heard in self._heard.items()
        }

    def _begin(self, server: str, heard: _Heard, told: Told, cutting: Cutting) -> bool:
        others = [each for each in self.balancer.servers if each != server]
        if not cutting.is_known or (others and cutting != self.cutting):
            self._give_up(server, "cuts text otherwise than the other servers, or than this router: set them up alike")
            return True
        if cutting != self.cutting:
            self.cutting = cutting
        self._forget(server)
        self.balancer.join(server)
        self._apply(server, heard, told)
        return True

    def _apply(self, server: str, heard: _Heard, told: Told) -> None:
        heard.run, heard.next_number = told.run, told.number + 1
        held, gone = unpack(told.held), unpack(told.gone)
        self.balancer.index.add(server, held)
        self.balancer.index.remove(server, gone)
        for name in [*held.tolist(), *gone.tolist()] if heard.assumed else ():
            heard.assumed.pop(name, None)
        if self._on_new is not None and told.begins is None:
            self._on_new(server, held.tolist())

    def _give_up(self, server: str, error: str) -> None:
        self._heard[server].error = error
        self._leave(server)

    def _forget(self, server: str) -> None:
        self.balancer.index.forget(server)
        self._heard[server].assumed.clear()

    def _leave(self, server: str) -> None:
        self._forget(server)
        self._heard[server].next_number = -1
        self.balancer.leave(server)
        if not self.balancer.servers:
            self.cutting = None
