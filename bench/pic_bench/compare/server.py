"""A benchmark server's life: start in its own process group, wait until healthy, stop, leave nothing behind."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from pic_bench.out_folder import without_secrets
from sglang_pic.errors import BenchError

HEALTH_POLL_S = 0.25
POST_TIMEOUT_S = 600.0
HEALTH_TIMEOUT_S = 30.0  # /health generates one token: on a slow CPU its answer takes seconds
TERM_GRACE_S = 20.0
KILL_GRACE_S = 10.0
# Kernels give ports from 32768 on to whoever asks for any; SGLang takes some more, 233 above its own.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A TCP port that was free a moment ago, and that no kernel gives to others while a server starts."""
    # Not what is seeded elsewhere: servers that start at once want ports of their own.
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise BenchError(f"no port of 127.0.0.1 from {_PORTS.start} to {_PORTS.stop} is free: end what listens there")


def launch_command(model: str, port: int, server_args: Sequence[str]) -> list[str]:
    """The command line of an SGLang server of this Python environment on `port` of the loopback interface."""
    head = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    return [*head, "--host", "127.0.0.1", "--port", str(port), *server_args]


# Loopback only: a proxy from the environment must not see these requests.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def request(url: str, body: object = None, *, timeout_s: float) -> HTTPResponse:
    """The open answer to a GET, or to a POST of `body` as JSON.

    Raises:
        OSError: no answer, or one with an error status (urllib's errors are OSErrors).
    """
    data = None if body is None else msgspec.json.encode(body)
    asked = urllib.request.Request(url, data, {} if data is None else {"Content-Type": "application/json"})
    return _OPENER.open(asked, timeout=timeout_s)


_TOLD = re.compile(r"sglang[:_](pic_|spec_verify_calls_total$)")
# SGLang's own labels say which rank and model: the same in every sample of a run, so they are left out of the keys.
_OWN_LABELS = frozenset({"source", "reason", "policy", "mode"})


def pic_counters(page: str) -> dict[str, float]:
    """Every `sglang:pic_*` sample of `page`, summed over ranks; the key keeps the labels that tell samples apart.

    With speculative decoding also `sglang:spec_verify_calls_total`: tokens of answers by it are the accepted length.

    Histogram buckets and creation times are left out: their `_sum` and `_count` stay.
    """
    found: dict[str, float] = {}
    for sample in (sample for family in text_string_to_metric_families(page) for sample in family.samples):
        if _TOLD.match(sample.name) and not sample.name.endswith(("_bucket", "_created")):
            labels = ",".join(f"{name}={sample.labels[name]}" for name in sorted(_OWN_LABELS & sample.labels.keys()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            found[key] = found.get(key, 0.0) + sample.value
    return dict(sorted(found.items()))


@dataclass(eq=False)
class Server:
    """A server process as a context manager: entering starts it and waits for health, leaving stops it.

    The process leads its own session and process group, so that a Ctrl-C in the terminal reaches only the
    benchmark, which then stops the server in order.

    Args:
        command: the whole command line.
        port: the port on the loopback interface that the command will listen on.
        log_path: receives stdout and stderr; overwritten.
        env: variables on top of this process's own; a value of None removes one.
        start_timeout_s: how long the server may take until it is healthy.

    Raises:
        BenchError: on entry, if the command cannot start, ends, or is not healthy in time; on exit, if a process
            outlives SIGKILL.
    """

    command: Sequence[str]
    _: KW_ONLY
    port: int
    log_path: Path
    env: Mapping[str, str | None] | None = None
    start_timeout_s: float = 900.0
    ready_after_s: float = field(default=0.0, init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _family: set[psutil.Process] = field(default_factory=set, init=False)
    _scratch: tempfile.TemporaryDirectory[str] | None = field(default=None, init=False)
    """For the server's temporary files: SGLang never removes its sockets, and no metrics when it is killed."""

    @property
    def base_url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the command, which is also its session and group id."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def __enter__(self) -> Server:
        try:
            self._start()
            self._wait_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check_alive(self, grace_s: float = 0.0) -> None:
        """Raise BenchError with the log's last lines if the server has ended, or ends within `grace_s`."""
        code = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(grace_s)
        if code is not None:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
            raise BenchError(f"the server {how}. Log: {self.log_path}, its last lines:\n{self.log_tail()}")

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Run the body; if the server ends meanwhile, interrupt the body and raise BenchError with the log's tail.

        The body runs in the main thread. The interruption is a KeyboardInterrupt, so it may clean up as for Ctrl-C.
        """
        assert self._process is not None, "the server was not started"
        process, over, main = self._process, threading.Event(), threading.get_ident()

        def wait_for_end() -> None:
            while not over.wait(HEALTH_POLL_S):
                self._remember_family(process.pid)
                if process.poll() is not None:
                    if not over.is_set():
                        signal.pthread_kill(main, signal.SIGINT)
                    return

        watcher = threading.Thread(target=wait_for_end, name="server-watch", daemon=True)
        # A shell starts background jobs with SIGINT ignored: the watcher's signal must arrive all the same.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        watcher.start()
        try:
            try:
                yield
            finally:
                over.set()
                watcher.join()
                signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        except BaseException:
            self.check_alive()  # the server's end explains the failure better than the failure itself
            raise
        self.check_alive()

    def stop(self) -> None:
        """SIGTERM to the server, then SIGKILL to the rest of its group and descendants. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        self._remember_family(process.pid)
        try:
            # Only the server itself: it ends its workers, and takes one that a signal ended first for a crash.
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(TERM_GRACE_S)
        finally:
            # A second Ctrl-C lands here as well: the group is killed whatever happened above.
            left = self._kill_rest(process)
            if self._scratch is not None:
                self._scratch.cleanup()
        if left:
            raise BenchError(f"server processes outlived SIGKILL: {left}. End them by hand; log: {self.log_path}")

    def log_tail(self) -> str:
        """The last 30 lines of the server's log."""
        text = self.log_path.read_text("utf8", errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-30:])

    def get(self, path: str, timeout_s: float = HEALTH_TIMEOUT_S) -> str:
        """The body of a GET on the running server.

        Raises:
            OSError: if the server does not answer with a success status (urllib's errors are OSErrors).
        """
        with request(self.base_url + path, timeout_s=timeout_s) as answer:
            return answer.read().decode("utf8", errors="replace")

    def post(self, path: str, body: object, timeout_s: float = POST_TIMEOUT_S) -> Any:
        """The JSON answer to a POST of `body` as JSON; the text where the answer is no JSON.

        Raises:
            BenchError: the server answered with an error status; the message has the status and the answer.
            OSError: it did not answer.
        """
        try:
            with request(self.base_url + path, body, timeout_s=timeout_s) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode("utf8", errors="replace")
            raise BenchError(f"{path}: HTTP {error.code}: {said[:2000]}") from error
        return msgspec.json.decode(text) if text.startswith((b"{", b"[")) else text.decode("utf8")

    def _start(self) -> None:
        self.ready_after_s = 0.0
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = tempfile.TemporaryDirectory(prefix="pic-server-", ignore_cleanup_errors=True)
        wanted = {**os.environ, "TMPDIR": self._scratch.name, **(self.env or {})}
        env = {name: value for name, value in wanted.items() if value is not None}
        with self.log_path.open("wb", buffering=0) as log:
            log.write(f"$ {shlex.join(without_secrets(self.command))}\n".encode())
            try:
                self._process = subprocess.Popen(
                    self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
                )
            except OSError as error:
                self._scratch.cleanup()
                raise BenchError(
                    f"cannot start the server ({error}). Command: {shlex.join(without_secrets(self.command))}"
                ) from error

    def _wait_healthy(self) -> None:
        assert self._process is not None
        started = time.monotonic()
        while True:
            waited = time.monotonic() - started
            self.check_alive()
            with suppress(OSError, ValueError):
                self.get("/health")
                self.ready_after_s = time.monotonic() - started
            self._remember_family(self._process.pid)
            if self.ready_after_s:
                return
            if waited > self.start_timeout_s:
                raise BenchError(
                    f"the server was not healthy after {waited:.0f} s (--start-timeout {self.start_timeout_s:g}); "
                    f"raise the limit or read its log: {self.log_path}\n{self.log_tail()}"
                )
            time.sleep(HEALTH_POLL_S)

    def _remember_family(self, pid: int) -> None:
        """Note every descendant: a process that left the session is still found when its parent is gone."""
        with suppress(psutil.Error):
            self._family.update(psutil.Process(pid).children(recursive=True))
        for process in psutil.process_iter():
            with suppress(OSError):
                if os.getsid(process.pid) == pid != process.pid:
                    self._family.add(process)

    def _kill_rest(self, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """Kill the rest of the group and of the descendants; returns those still alive."""
        self._remember_family(process.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_GRACE_S)
        for member in self._family:
            with suppress(psutil.Error):  # is_running() compares start times: a recycled pid is not ours
                if member.is_running():
                    member.kill()
        _, left = psutil.wait_procs(list(self._family), timeout=KILL_GRACE_S)
        self._family.clear()
        return [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
