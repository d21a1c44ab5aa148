"""The server's end of the content events' port: who is connected, and what each of them has not got yet.

A listener proves that it knows the secret before anything is kept for it, and says nothing after that. So whoever else
reaches the port costs a few sockets and a bounded step ten times a second. (ZeroMQ reads all that a peer sends, and
keeps every topic: 10 s of subscriptions held back all messages and took 3.3 GB, with its limits set.)
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
# Connections that have not proved anything; the oldest makes room.
_MAX_UNPROVED: Final = 64
_MAX_ACCEPTED: Final = 32  # a step
_PROOF_S: Final = 2.0
# Of a listener that does not keep up; then it is disconnected. Listeners share messages, so this bounds all of them.
_MAX_UNSENT_BYTES: Final = 1 << 22
_DEAD_MS: Final = 10_000


@dataclass(slots=True)
class _Listener:
    peer: socket.socket
    proof: bytes
    since: float
    given: bytes = b""
    has_begun: bool = False
    """Whether it gets what is sent: from the first message on that tells everything anew."""
    unsent: deque[memoryview] = field(default_factory=deque)


class Listeners:
    """Whoever is told; never waits, and is used by one thread.

    Args:
        endpoint: where to listen, such as `tcp://127.0.0.1:5570`.
        salt: the secret that listeners have to know.

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
        """Whether some have been told nothing yet: the next message has to begin anew."""
        return not all(each.has_begun for each in self._proved)

    def step(self) -> None:
        """Take proofs and connections, and send what waits; bounded work."""
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
        """Have a message sent to all that have begun, and to all if it begins anew."""
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
        """Whether a connection may go on: it proved what it has to, or has still to do so."""
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
    """Send to a listener what it takes; False, and disconnected, where it left, speaks or does not keep up."""
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
