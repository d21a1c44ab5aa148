"""The server's side: a thread that salts the names of donors' chunks and sends them to whoever listens.

One XPUB socket: when a listener subscribes everything is told anew. A router that joins and one that missed a message
both subscribe, so a server keeps no past messages.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import zmq

from sglang_pic.errors import ConfigError
from sglang_pic.route.sketch import salted
from sglang_pic.route.wire import HEARTBEAT_S, MAX_NAMES, Cutting, Told, encode, pack

logger = logging.getLogger(__name__)

_PERIOD_S: Final = 0.1
"""Most messages a second: 10."""

_BEGIN_PERIOD_S: Final = 1.0
"""Everything is told anew so often at most, however many listeners subscribe."""

# A round of the scheduler leaves one batch; the thread takes all that wait ten times a second.
_MAX_BATCHES: Final = 256
# Messages for a listener that does not keep up; then it loses some, and asks for everything.
_MAX_UNSENT: Final = 64
# How many names are salted before another thread gets its turn.
_SLICE: Final = 1_000

Change = tuple[Hashable, int, int]
"""A namespace, the name of one of its chunks, and 1 for a new donor or -1 for one that went."""


class _Batch(NamedTuple):
    """Changes in their order; `is_all` where there was nothing before."""

    changes: Sequence[Change]
    is_all: bool


class PublisherReport(msgspec.Struct, frozen=True, kw_only=True):
    """The content events' part of `/server_info`."""

    endpoint: str
    num_names: int
    """Chunks that were told and not taken back."""
    num_messages: int
    num_bytes: int
    num_begun: int
    """How often everything was told anew."""
    num_overflows: int
    """How often the thread did not keep up, or failed."""


class Publisher:
    """Publishes what a server can splice; `put` may be called from one thread, and never waits.

    Args:
        endpoint: where listeners connect, such as `tcp://*:5570`.
        salt: the secret that servers and routers share.
        cutting: how this server cuts.
        namespace_of: the canonical bytes of a namespace; None where its donors are not told.
        count: called with the size of each message in bytes.

    Raises:
        ConfigError: the endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        salt: bytes,
        cutting: Cutting,
        namespace_of: Callable[[Hashable], bytes | None],
        count: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._salt, self._cutting, self._namespace_of, self._count = salt, cutting, namespace_of, count
        self._waiting: queue.Queue[_Batch] = queue.Queue(_MAX_BATCHES)
        # Donors of each told name, over all chunks and namespaces; shrinks with their donors.
        self._donors: Counter[int] = Counter()
        # What listeners have, and the names of which that may be wrong. Shrink likewise.
        self._told: set[int] = set()
        self._changed: set[int] = set()
        self._run, self._number = secrets.randbits(63), 0
        self._wants_begin, self._begun_at, self._sent_at = False, 0.0, 0.0
        self.is_behind = False
        """Whether changes were lost: the next batch must be of all donors."""
        self.num_bytes = self.num_begun = self.num_overflows = 0
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.XPUB)
        self._socket.set(zmq.XPUB_VERBOSE, 1)
        self._socket.set(zmq.SNDHWM, _MAX_UNSENT)
        self._socket.set(zmq.LINGER, 0)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy()
            raise ConfigError(
                f"content_events.endpoint={endpoint!r}: {error}; give a free port as in tcp://*:5570"
            ) from error
        self.endpoint: str = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="pic-content-events", daemon=True)
        self._thread.start()

    def put(self, changes: Sequence[Change], *, is_all: bool = False) -> None:
        """Have changes published; where too many wait, `is_behind` is set.

        Args:
            changes: in their order; not to be changed afterwards.
            is_all: whether they are all donors that there are.
        """
        if self.is_behind and not is_all:
            return
        try:
            self._waiting.put_nowait(_Batch(changes, is_all))
            self.is_behind = False
        except queue.Full:
            self._fall_behind()

    def report(self) -> PublisherReport:
        """What was published so far."""
        return PublisherReport(
            endpoint=self.endpoint,
            num_names=len(self._told),
            num_messages=self._number,
            num_bytes=self.num_bytes,
            num_begun=self.num_begun,
            num_overflows=self.num_overflows,
        )

    def stop(self) -> None:
        """End the thread and close the socket."""
        self._stopped.set()
        self._thread.join()

    def _fall_behind(self) -> None:
        self.num_overflows += not self.is_behind
        self.is_behind = True

    def _work(self) -> None:
        while not self._stopped.wait(_PERIOD_S):
            try:
                self._take_subscriptions()
                self._take_changes()
                self._send()
            except Exception:
                # What was lost is told anew; requests go on without it.
                logger.warning("sglang_pic: content events failed", exc_info=True)
                self._fall_behind()
        self._context.destroy()

    def _take_subscriptions(self) -> None:
        while self._socket.poll(0):
            self._wants_begin |= self._socket.recv().startswith(b"\1")

    def _take_changes(self) -> None:
        while not self._waiting.empty():
            batch = self._waiting.get()
            if batch.is_all:
                self._changed.update(self._donors)
                self._donors.clear()
            for first in range(0, len(batch.changes), _SLICE):
                self._apply(batch.changes[first : first + _SLICE])
                if first:
                    time.sleep(0)

    def _apply(self, changes: Iterable[Change]) -> None:
        by_kind: dict[tuple[Hashable, int], list[int]] = {}
        for namespace, name, change in changes:
            by_kind.setdefault((namespace, change), []).append(name)
        for (namespace, change), names in by_kind.items():
            key = self._namespace_of(namespace)
            for name in [] if key is None else salted(names, key, self._salt).tolist():
                self._donors[name] += change
                if not self._donors[name]:
                    del self._donors[name]
                self._changed.add(name)

    def _send(self) -> None:
        now, begins = time.monotonic(), None
        if self._wants_begin and now - self._begun_at >= _BEGIN_PERIOD_S:
            self._wants_begin, self._begun_at, begins = False, now, self._cutting
            self.num_begun += 1
            self._told.clear()
            self._changed = set(self._donors)
        held, gone = self._next_names()
        if begins is None and not held and not gone and now - self._sent_at < HEARTBEAT_S:
            return
        told = Told(run=self._run, number=self._number, begins=begins, held=pack(held), gone=pack(gone))
        data = encode(told)
        self._socket.send(data)
        self._number, self._sent_at = self._number + 1, now
        self.num_bytes += len(data)
        self._count(len(data))

    def _next_names(self) -> tuple[list[int], list[int]]:
        """As many changed names as one message holds."""
        held: list[int] = []
        gone: list[int] = []
        while self._changed and len(held) + len(gone) < MAX_NAMES:
            name = self._changed.pop()
            if (name in self._donors) is (name in self._told):
                continue
            if name in self._donors:
                held.append(name)
                self._told.add(name)
            else:
                gone.append(name)
                self._told.discard(name)
        return held, gone


def all_donors(names: Mapping[Any, Iterable[int]]) -> list[Change]:
    """Every donor as a change, of `ContentIndex.donor_names`."""
    return [(namespace, name, 1) for namespace, found in names.items() for name in found]
