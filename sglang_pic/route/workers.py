"""Makes sketches of prompts in processes of their own, because a tokenizer holds Python's lock.

Large bodies have a process of their own, so that small ones do not wait for them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Final

from sglang_pic.route.request_body import Prompts
from sglang_pic.route.sketch import Sketched
from sglang_pic.route.wire import Cutting

_SMALL_BYTES: Final = 1 << 16
_MAX_WAITING: Final = 8

# A worker process's own.
_prompts: list[Prompts] = []


class Busy(Exception):
    """Too many prompts wait for a process."""


class Workers:
    """Two processes that make sketches, of bodies up to 64 KiB and of larger ones.

    Args:
        tokenizer: as for `Prompts`.
        salt: as for `Prompts`.
    """

    def __init__(self, tokenizer: str | None, salt: bytes) -> None:
        self._workers = [_Worker(tokenizer, salt) for _ in range(2)]

    async def sketch(self, data: bytes, cutting: Cutting, salt: str | None = None) -> Sketched | None:
        """As `Prompts.sketch`; not stopped if the caller is cancelled.

        Raises:
            Busy: too many prompts wait.
            BrokenProcessPool: the process ended; the next call starts a new one.
        """
        return await self._workers[len(data) > _SMALL_BYTES].sketch(data, cutting, salt)

    def stop(self) -> None:
        """End the processes after their current prompts."""
        for worker in self._workers:
            worker.stop()


class _Worker:
    def __init__(self, tokenizer: str | None, salt: bytes) -> None:
        self._given = (tokenizer, salt)
        self._start()

    async def sketch(self, data: bytes, cutting: Cutting, salt: str | None = None) -> Sketched | None:
        if len(self._waiting) >= _MAX_WAITING:
            raise Busy
        if self._is_broken:
            self._start()
        future = self._pool.submit(_sketch, data, cutting, salt)
        # NOTE: the callback runs in a thread of the pool; a set's own changes are atomic.
        self._waiting.add(future)
        future.add_done_callback(self._note)
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, _begin, self._given)
        self._waiting: set[Future[Sketched | None]] = set()
        self._is_broken = False
        # Loads the tokenizer before the first prompt.
        self._pool.submit(_sketch, b"", Cutting(chunk_min_tokens=1, chunk_avg_tokens=1, chunk_max_tokens=1))

    def _note(self, future: Future[Sketched | None]) -> None:
        self._waiting.discard(future)
        self._is_broken |= not future.cancelled() and isinstance(future.exception(), BrokenProcessPool)


def _begin(tokenizer: str | None, salt: bytes) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _prompts.append(Prompts(tokenizer, salt))


def _end_with_parent() -> None:
    """End this process with its parent, also if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a process of a pool"
    parent.join()
    os._exit(1)


def _sketch(data: bytes, cutting: Cutting, salt: str | None = None) -> Sketched | None:
    return _prompts[0].sketch(data, cutting, salt)
