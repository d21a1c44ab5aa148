"""Replays in processes of their own that take turns: one call of each after the other, in a ring of pipes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

TURN: Final = b"."
"""The byte that is passed along the ring."""


class Turns:
    """The turns of one replay.

    Args:
        fds: the pipe from the replay before, to read, and the one to the next, to write. Their ends close with the
            process: then the next replay waits no longer.
    """

    def __init__(self, fds: tuple[int, int]) -> None:
        from gevent.os import make_nonblocking

        self._before, self._next = fds
        make_nonblocking(self._before)

    @contextmanager
    def turn(self) -> Iterator[float]:
        """Wait for the turn, run the body, and pass the turn on; gives the moment at which the turn came."""
        from gevent.os import nb_read

        nb_read(self._before, len(TURN))
        try:
            yield time.monotonic()
        finally:
            with suppress(BrokenPipeError):
                os.write(self._next, TURN)
