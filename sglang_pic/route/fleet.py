"""The router's side: which chunks each server has announced, and which servers are there.

A server that is silent, wrong or of another version gets no prompts, or costs hits; no request fails.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from sglang_pic.route.balancer import Balancer, Route
from sglang_pic.route.fleet_index import FleetIndex
from sglang_pic.route.sketch import Names, Sketched
from sglang_pic.route.wire import SILENT_S, Cutting, Update, decode, unpack

ASSUMED_S: Final = 60.0
"""A server that gets a prompt is assumed to have its chunks for so long; by then it has announced them."""

MAX_DELIMITERS: Final = 1024
"""Most delimiters of a server: a prompt is searched for each."""


@dataclass(slots=True)
class _Heard:
    """The state of one server."""

    run: int = 0
    next_number: int = -1
    at: float = -math.inf
    num_messages: int = 0
    num_bytes: int = 0
    num_gaps: int = 0
    error: str = ""
    cutting: Cutting | None = None
    """How it cuts; None while it is not available."""
    assumed: dict[int, float] = field(default_factory=dict)
    """Assumed names and until when they count, oldest first; shrinks with time and with the server's messages."""


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One server in `/status`."""

    is_there: bool
    """Whether prompts are routed to it."""
    num_names: int
    """Names of its chunks."""
    waiting_tokens: int
    """Estimated tokens that its requests wait for."""
    num_messages: int
    num_bytes: int
    """Bytes of content events."""
    num_gaps: int
    """How often messages were lost, and all names were requested again."""
    error: str
    """Why its messages cannot be used; empty if they can."""


class Fleet:
    """The names that all servers announced. Not thread-safe.

    Prompts go to the servers that cut as most of them do; in a tie, as the first of `servers`.

    Args:
        servers: their addresses.
    """

    def __init__(self, servers: Iterable[str]) -> None:
        self._heard = {server: _Heard() for server in servers}
        self.balancer = Balancer(FleetIndex())
        self.cutting: Cutting | None = None
        """How the available servers cut; None if there are none."""

    def take(self, server: str, data: bytes, now: float) -> bool:
        """Apply a message of a server; False if one before it was lost, so that all names must be sent again.

        Args:
            server: one of the constructor's.
            data: the message.
            now: `time.monotonic()`.
        """
        heard = self._heard[server]
        heard.num_messages += 1
        heard.num_bytes += len(data)
        try:
            update = decode(data)
        except (ValueError, msgspec.DecodeError) as error:
            self._give_up(server, f"not a message: {error}")
            return True
        heard.at = now
        if update.begins is not None:
            return self._begin(server, heard, update, update.begins)
        if (update.run, update.number) != (heard.run, heard.next_number):
            if update.run != heard.run:
                self._forget(server)
            heard.num_gaps += heard.next_number >= 0
            heard.next_number = -1
            return False
        self._apply(server, heard, update)
        return True

    def assume(self, server: str, names: Names, now: float) -> None:
        """Assume that a server that gets a prompt has its names, before it announces them.

        The next call of a session comes sooner than content events.
        """
        heard = self._heard.get(server)
        if heard is None or server not in self.balancer.servers:
            return
        fresh = self.balancer.index.add(server, names.tolist())
        heard.assumed.update(dict.fromkeys(fresh, now + ASSUMED_S))

    def leave_silent(self, now: float) -> None:
        """Remove servers that have been silent."""
        for server, heard in self._heard.items():
            if heard.cutting is not None and now - heard.at > SILENT_S:
                self._leave(server)

    def expire(self, now: float) -> None:
        """Remove names that servers were assumed to have and did not announce in time."""
        for server, heard in self._heard.items():
            late = [name for name, _ in itertools.takewhile(lambda each: each[1] < now, heard.assumed.items())]
            if late:
                self.balancer.index.remove(server, late)
                for name in late:
                    del heard.assumed[name]

    def route(self, sketched: Sketched, now: float) -> Route | None:
        """As `Balancer.route`; then assumes that the server has the prompt."""
        route = self.balancer.route(sketched, now)
        if route is not None:
            self.assume(route.server, sketched.names, now)
        return route

    def status(self, now: float) -> dict[str, ServerStatus]:
        """The status of each server."""
        there = set(self.balancer.servers)
        return {
            server: ServerStatus(
                is_there=server in there,
                num_names=self.balancer.index.num_names(server),
                waiting_tokens=round(self.balancer.waiting(server, now)),
                num_messages=heard.num_messages,
                num_bytes=heard.num_bytes,
                num_gaps=heard.num_gaps,
                error=heard.error,
            )
            for server, heard in self._heard.items()
        }

    def _begin(self, server: str, heard: _Heard, update: Update, cutting: Cutting) -> bool:
        if not cutting.is_known or len(cutting.delimiters) > MAX_DELIMITERS:
            self._give_up(server, "cuts text in a way that this router does not support: update both")
            return True
        self._forget(server)
        heard.cutting = cutting
        self._apply(server, heard, update)
        self._settle()
        return True

    def _settle(self) -> None:
        """Make the servers available that cut as most do."""
        known = [heard.cutting for heard in self._heard.values() if heard.cutting is not None]
        self.cutting = max(known, key=known.count, default=None)
        for server, heard in self._heard.items():
            if heard.cutting is not None and heard.cutting == self.cutting:
                heard.error = ""
                self.balancer.join(server)
                continue
            self.balancer.leave(server)
            if heard.cutting is not None:
                heard.error = "cuts text otherwise than most servers: give all the same settings and tokenizer"

    def _apply(self, server: str, heard: _Heard, update: Update) -> None:
        heard.run, heard.next_number = update.run, update.number + 1
        held, gone = unpack(update.held).tolist(), unpack(update.gone).tolist()
        self.balancer.index.add(server, held)
        self.balancer.index.remove(server, gone)
        for name in [*held, *gone] if heard.assumed else ():
            heard.assumed.pop(name, None)

    def _give_up(self, server: str, error: str) -> None:
        self._heard[server].error = error
        self._leave(server)

    def _forget(self, server: str) -> None:
        self.balancer.index.forget(server)
        self._heard[server].assumed.clear()

    def _leave(self, server: str) -> None:
        self._forget(server)
        self._heard[server].next_number, self._heard[server].cutting = -1, None
        self._settle()
