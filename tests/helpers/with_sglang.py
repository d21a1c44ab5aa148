"""Processes that have SGLang imported when they begin: imports are most of the time that a small server starts in."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from threading import Lock
from typing import IO, Any


@cache
def with_sglang() -> ForkServerContext:
    """How such processes are started, all from one that has imported what `imported.py` does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.imported"])
    return context


class ForkedPopen:
    """A `python -m MODULE ...` in such a process, with what a benchmark's `Server` uses of `subprocess.Popen`.

    Args:
        command: the command line; its interpreter is this one.
        env: the whole environment.
        stdout: a file that is open for writing; receives stderr, too.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes], **_: Any) -> None:
        self.args = command
        self._process = with_sglang().Process(target=_run, args=(command[2:], dict(env), stdout.name))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._lock = Lock()

    def poll(self) -> int | None:
        """The exit status, minus the signal's number after a signal; None while it runs."""
        with self._lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended; raises `subprocess.TimeoutExpired` if it has not in so many seconds."""
        wait([self._process.sentinel], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code


def _run(words: list[str], env: dict[str, str], log: str) -> None:
    """Become a process that was started on its own: a session, an environment, a path and a log of its own."""
    os.setsid()
    with open(os.devnull, "rb") as nothing, open(log, "ab") as said:
        for number, stream in enumerate((nothing, said, said)):
            os.dup2(stream.fileno(), number)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    module, *sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)
