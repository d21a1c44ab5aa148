"""Listens to the content events of one server, as a router does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from sglang_pic.route.listening import listen
from sglang_pic.route.wire import Cutting, decode, unpack


class Listener:
    """What a server told so far."""

    def __init__(self, endpoint: str, salt: bytes) -> None:
        self.names: set[int] = set()
        self.cutting: Cutting | None = None
        self.num_begun = 0
        self.times: list[float] = []
        self._is_lost = False
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(listen(endpoint, salt, self._take))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def ask_anew(self) -> None:
        self._is_lost = True

    def wait_for(self, names: set[int], *, num_begun: int = 1, limit_s: float = 30.0) -> None:
        """Listen until exactly these names are known."""
        self.wait_until(lambda: self.names == names and self.num_begun >= num_begun, limit_s)

    def wait_until(self, is_so: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < deadline, f"{len(self.names)} names, begun {self.num_begun} times"
            time.sleep(0.02)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)

    def _take(self, data: bytes) -> bool:
        message, names = decode(data), self.names
        self.times.append(time.monotonic())
        if message.begins is not None:
            self.cutting, names = message.begins, set()
            self.num_begun += 1
        self.names = (names | set(unpack(message.held).tolist())) - set(unpack(message.gone).tolist())
        is_taken, self._is_lost = not self._is_lost, False
        return is_taken
