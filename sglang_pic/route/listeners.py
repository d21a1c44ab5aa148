"""The server's end of the content events' port: the connected listeners and their unsent messages.

A listener proves that it knows the secret before messages are kept for it, and sends nothing else. So other peers cost
a few sockets and a bounded step ten times a second. (ZeroMQ reads all that a peer sends, and keeps every topic: 10 s of
subscriptions delayed all messages and took 3.3 GB, with its limits set.)
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from sglang_pic.errors import ConfigError
from sglang_pic.route.wire import NONCE_BYTES, PROOF_BYTES, address, framed, prove

_MAX_LISTENERS: Final = 64
# Connections without a proof; a new one closes the oldest.
_MAX_UNPROVED: Final = 64
_MAX_ACCEPTED: Final = 32  # a step
_PROOF_S: Final = 2.0
# A listener with more is disconnected. Listeners share messages, so this limits all of them together.
_MAX_UNSENT_BYTES: Final = 1 << 22
_DEAD_MS: Final = 10_000


@dataclass(slots=True)
class _Listener:
    peer: socket.socket
    proof: bytes
    since: float
    given: bytes = b""
    has_begun: bool = False
    """Whether it gets messages: from the first one with all names on."""
    unsent: deque[memoryview] = field(default_factory=deque)


class Listeners:
    """The connected listeners; never blocks; used by one thread.

    Args:
        endpoint: where to listen, such as `tcp://127.0.0.1:5570`.
        salt: the secret that listeners must know.

    Raises:
        ConfigError: the endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, salt: bytes) -> None:
        self._salt = salt
        self._unproved: deque[_Listener] = deque()
        self._proved: list[_Listener] = []
        try:
            host, port = address(endpoint)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._port = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                f"content_events.endpoint={endpoint!r}: {error}; give an address of this machine and a free port, as "
                "in tcp://127.0.0.1:5570"
            ) from error
        self._port.setblocking(False)
        host, port = self._port.getsockname()[:2]
        self.endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    @property
    def wants_all(self) -> bool:
        """Whether a listener is new: the next message must begin with all names."""
        return not all(each.has_begun for each in self._proved)

    def step(self) -> None:
        """Accept connections and proofs, and send waiting messages; bounded work."""
        now = time.monotonic()
        for each in [*self._unproved]:
            if now - each.since > _PROOF_S or not self._take_proof(each):
                self._unproved.remove(each)
                each.peer.close()
            elif len(each.given) == PROOF_BYTES:
                self._unproved.remove(each)
                self._proved.append(each)
        with suppress(OSError):
            for _ in range(_MAX_ACCEPTED):
                self._accept(now)
        self._proved = [each for each in self._proved if _is_fine(each)]

    def send(self, data: bytes, *, begins: bool) -> None:
        """Queue a message for listeners that have begun, or for all if it `begins` with all names."""
        frame = memoryview(framed(data))
        for each in self._proved:
            each.has_begun |= begins
            if each.has_begun:
                each.unsent.append(frame)
        self._proved = [each for each in self._proved if _is_fine(each)]

    def close(self) -> None:
        """Disconnect all."""
        for each in (*self._unproved, *self._proved):
            each.peer.close()
        self._port.close()

    def _accept(self, now: float) -> None:
        peer, _ = self._port.accept()
        nonce = secrets.token_bytes(NONCE_BYTES)
        with suppress(OSError):
            peer.setblocking(False)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_MS)
            peer.send(nonce)
        if len(self._unproved) == _MAX_UNPROVED:
            self._unproved.popleft().peer.close()
        self._unproved.append(_Listener(peer, prove(nonce, self._salt), now))

    def _take_proof(self, each: _Listener) -> bool:
        """Whether a connection stays: its proof is right, or not complete."""
        try:
            part = each.peer.recv(PROOF_BYTES + 1 - len(each.given))
        except BlockingIOError:
            return True
        except OSError:
            return False
        each.given += part
        if not part or len(each.given) < PROOF_BYTES:
            return bool(part)
        return hmac.compare_digest(each.given, each.proof) and len(self._proved) < _MAX_LISTENERS


def _is_fine(each: _Listener) -> bool:
    """Send waiting messages to a listener; False, and disconnected, if it left, sent data or has too many unsent."""
    with suppress(OSError):
        try:
            each.peer.recv(1)
        except BlockingIOError:
            with suppress(BlockingIOError):
                while each.unsent:
                    each.unsent[0] = each.unsent[0][each.peer.send(each.unsent[0]) :]
                    if not each.unsent[0]:
                        each.unsent.popleft()
            if sum(map(len, each.unsent)) <= _MAX_UNSENT_BYTES:
                return True
    each.peer.close()
    return False
