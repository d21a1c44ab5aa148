"""The server's side: a thread that salts the names of donors' chunks and sends them to whoever listens.

When a listener connects all names are sent again, so a server keeps no past messages.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from sglang_pic.route.announced import AnnouncedNames, Change
from sglang_pic.route.listeners import Listeners
from sglang_pic.route.wire import HEARTBEAT_S, MAX_NAMES, Cutting, Update, encode, pack

logger = logging.getLogger(__name__)

_PERIOD_S: Final = 0.1
"""Most messages a second: 10."""

_BEGIN_PERIOD_S: Final = 1.0
"""All names are sent again at most so often, however many listeners connect."""

# A round of the scheduler leaves one batch; the thread takes all that wait ten times a second.
_MAX_BATCHES: Final = 256
# How many names are salted before another thread gets its turn.
_SLICE: Final = 1_000


class _Batch(NamedTuple):
    """Changes in their order; `is_all` where there was nothing before."""

    changes: Sequence[Change]
    is_all: bool


class PublisherReport(msgspec.Struct, frozen=True, kw_only=True):
    """The content events' part of `/server_info`."""

    endpoint: str
    num_names: int
    """Names of chunks that listeners have."""
    num_messages: int
    num_bytes: int
    num_begun: int
    """How often all names were sent again."""
    num_overflows: int
    """How often the thread did not keep up, or failed."""


class Publisher:
    """Publishes what a server can splice; `put` may be called from one thread, and never waits.

    Args:
        endpoint: where listeners connect, such as `tcp://127.0.0.1:5570`.
        salt: the secret that servers and routers share; listeners without it get nothing.
        cutting: how this server cuts.
        namespace_of: the canonical bytes of a namespace; None where its donors are not announced.
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
        self._cutting, self._count = cutting, count
        self._waiting: queue.Queue[_Batch] = queue.Queue(_MAX_BATCHES)
        self._names = AnnouncedNames(salt, namespace_of)
        self._run, self._number = secrets.randbits(63), 0
        self._begun_at, self._sent_at = 0.0, 0.0
        self.is_behind = False
        """Whether changes were lost: the next batch must be of all donors."""
        self.num_bytes = self.num_begun = self.num_overflows = 0
        self._listeners = Listeners(endpoint, salt)
        self.endpoint = self._listeners.endpoint
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
            num_names=len(self._names),
            num_messages=self._number,
            num_bytes=self.num_bytes,
            num_begun=self.num_begun,
            num_overflows=self.num_overflows,
        )

    def stop(self) -> None:
        """End the thread and close the port."""
        self._stopped.set()
        self._thread.join()

    def _fall_behind(self) -> None:
        self.num_overflows += not self.is_behind
        self.is_behind = True

    def _work(self) -> None:
        while not self._stopped.wait(_PERIOD_S):
            try:
                self._listeners.step()
                self._take_changes()
                self._send()
            except Exception:
                # The next batch has all names again; requests do not wait.
                logger.warning("sglang_pic: content events failed", exc_info=True)
                self._fall_behind()
        self._listeners.close()

    def _take_changes(self) -> None:
        while not self._waiting.empty():
            batch = self._waiting.get()
            if batch.is_all:
                self._names.lose_all()
            for first in range(0, len(batch.changes), _SLICE):
                self._names.apply(batch.changes[first : first + _SLICE])
                if first:
                    time.sleep(0)

    def _send(self) -> None:
        now, begins = time.monotonic(), None
        if self._listeners.wants_all and now - self._begun_at >= _BEGIN_PERIOD_S:
            self._begun_at, begins = now, self._cutting
            self.num_begun += 1
            self._names.begin()
        held, gone = self._names.take(MAX_NAMES)
        if begins is None and not held and not gone and now - self._sent_at < HEARTBEAT_S:
            return
        update = Update(run=self._run, number=self._number, begins=begins, held=pack(held), gone=pack(gone))
        data = encode(update)
        self._listeners.send(data, begins=begins is not None)
        self._number, self._sent_at = self._number + 1, now
        self.num_bytes += len(data)
        self._count(len(data))


def all_donors(names: Mapping[Any, Iterable[int]]) -> list[Change]:
    """Every donor as a change, of `ContentIndex.donor_names`."""
    return [(namespace, name, 1) for namespace, found in names.items() for name in found]
