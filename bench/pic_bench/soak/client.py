"""Sends the requests of a soak, and does to each what its fault says."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from typing import Any

import msgspec

from pic_bench.compare.server import Server
from pic_bench.soak.load import Fault, Request
from sglang_pic.errors import BenchError

_TIMEOUT_S = 300.0
# About what a request lives under load.
_LIFE_S = 2.0


class Outcomes:
    """What became of the requests; of several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        """By outcome: answered, and the faults that took effect."""
        self.faults: Counter[str] = Counter()
        """By kind, as injected."""
        self.failures: list[str] = []
        """Answers that no fault explains."""

    def add(self, outcome: str) -> None:
        """Count an outcome."""
        with self._lock:
            self.counts[outcome] += 1

    def inject(self, fault: str) -> None:
        """Count a fault."""
        with self._lock:
            self.faults[fault] += 1

    def fail(self, what: str) -> None:
        """Note what no fault explains."""
        with self._lock:
            self.failures.append(what)

    @property
    def num_requests(self) -> int:
        """Requests that have come to an end."""
        return self.counts.total()


def send(server: Server, request: Request, outcomes: Outcomes) -> dict[str, Any] | None:
    """Send one request; its answer where it has one that is complete."""
    if request.fault is not Fault.NONE:
        outcomes.inject(request.fault.value)
    try:
        if request.fault is Fault.DISCONNECT:
            _leave(server, request, outcomes)
            return None
        aborter = None
        if request.fault is Fault.ABORT:
            aborter = threading.Timer(request.moment * _LIFE_S, _abort, (server, request))
            aborter.start()
        try:
            answer = server.post("/generate", request.body, _TIMEOUT_S)
        finally:
            if aborter is not None:
                aborter.cancel()
                aborter.join()
    except BenchError as error:
        if request.fault is Fault.INVALID and "HTTP 400" in str(error):
            outcomes.add("refused")
        elif request.fault is Fault.ABORT and "bort" in str(error):
            outcomes.add("aborted")
        else:
            outcomes.fail(f"{request.rid} ({request.fault.value}): {error}")
        return None
    except (OSError, http.client.HTTPException) as error:
        outcomes.fail(f"{request.rid} ({request.fault.value}): {type(error).__name__} {error}")
        return None
    return _judge(request, answer, outcomes)


def _judge(request: Request, answer: Any, outcomes: Outcomes) -> dict[str, Any] | None:
    """An answer of status 200."""
    if request.fault is Fault.INVALID:
        outcomes.fail(f"{request.rid}: {request.pic!r} was not refused")
        return None
    reason = (answer["meta_info"].get("finish_reason") or {}).get("type")
    if reason == "abort":
        if request.fault is Fault.ABORT:
            outcomes.add("aborted")
        else:
            outcomes.fail(f"{request.rid}: aborted by the server: {answer['meta_info']['finish_reason']}")
        return None
    # An abort may come when the answer is complete.
    if len(answer["output_ids"]) != request.new_tokens:
        outcomes.fail(f"{request.rid}: {len(answer['output_ids'])} tokens instead of {request.new_tokens}")
        return None
    outcomes.add("answered")
    return dict(answer)


def _leave(server: Server, request: Request, outcomes: Outcomes) -> None:
    """Read a few events of the stream and go away, at times before the first one."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_TIMEOUT_S)
    try:
        body = msgspec.json.encode(request.body)
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        if request.moment > 0.3:
            events = iter(connection.getresponse().readline, b"")
            for _ in range(2 * int(request.moment * request.new_tokens)):
                next(events, None)
        else:
            threading.Event().wait(request.moment * _LIFE_S)
    finally:
        connection.close()
    outcomes.add("disconnected")


def _abort(server: Server, request: Request) -> None:
    server.post("/abort_request", {"rid": request.rid}, _TIMEOUT_S)
