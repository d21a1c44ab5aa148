"""Listens to the content events of one server, as a router does."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from sglang_pic.route.wire import Cutting, decode, unpack


class Listener:
    """What a server told so far."""

    def __init__(self, endpoint: str) -> None:
        self.names: set[int] = set()
        self.cutting: Cutting | None = None
        self.num_begun = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")

    def subscribe_anew(self) -> None:
        self._socket.unsubscribe(b"")
        self._socket.subscribe(b"")

    def wait_for(self, names: set[int], *, num_begun: int = 1, limit_s: float = 30.0) -> None:
        """Listen until exactly these names are known."""
        self.wait_until(lambda: self.names == names and self.num_begun >= num_begun, limit_s)

    def wait_until(self, is_so: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < deadline, f"{len(self.names)} names, begun {self.num_begun} times"
            if self._socket.poll(100):
                message = decode(self._socket.recv())
                if message.begins is not None:
                    self.cutting = message.begins
                    self.num_begun += 1
                    self.names.clear()
                self.names |= set(unpack(message.held).tolist())
                self.names -= set(unpack(message.gone).tolist())

    def close(self) -> None:
        self._context.destroy(linger=0)
