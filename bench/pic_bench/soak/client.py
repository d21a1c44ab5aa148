"""Sends the requests of a soak, and does to each what its fault says."""

from __future__ import annotations

import http.client
import threading
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from pic_bench.compare.server import Server
from pic_bench.compare.server import request as open_answer
from pic_bench.soak.load import Fault, Request
from sglang_pic.errors import BenchError

_TIMEOUT_S = 300.0
# About what a request lives under load.
_LIFE_S = 2.0


class Outcome(NamedTuple):
    """What became of a request."""

    how: str
    """Answered, ended by a fault that was injected, or failed: that no fault explains."""
    answer: dict[str, Any] | None = None
    """Where it is complete."""
    failure: str | None = None


def send(server: Server, request: Request) -> Outcome:
    """Send one request; its outcome."""
    try:
        if request.fault is Fault.DISCONNECT:
            _leave(server, request)
            return Outcome("disconnected")
        abort = partial(server.post, "/abort_request", {"rid": request.rid}, _TIMEOUT_S)
        aborter = threading.Timer(request.moment * _LIFE_S, abort)
        if request.fault is Fault.ABORT:
            aborter.start()
        try:
            return _judge(request, server.post("/generate", request.body, _TIMEOUT_S))
        finally:
            aborter.cancel()
            if aborter.ident is not None:
                aborter.join()
    except BenchError as error:
        if request.fault is Fault.INVALID and "HTTP 400" in str(error):
            return Outcome("refused")
        if request.fault is Fault.ABORT and "bort" in str(error):
            return Outcome("aborted")
        return _failed(request, str(error))
    except (OSError, http.client.HTTPException) as error:
        return _failed(request, f"{type(error).__name__} {error}")


def _judge(request: Request, answer: dict[str, Any]) -> Outcome:
    """An answer of status 200."""
    if request.fault is Fault.INVALID:
        return _failed(request, f"{request.pic!r} was not refused")
    reason = answer["meta_info"].get("finish_reason") or {}
    if reason.get("type") == "abort":
        is_meant = request.fault is Fault.ABORT
        return Outcome("aborted") if is_meant else _failed(request, f"aborted by the server: {reason}")
    # An abort may come when the answer is complete.
    if (found := len(answer["output_ids"])) != request.new_tokens:
        return _failed(request, f"{found} tokens instead of {request.new_tokens}")
    return Outcome("answered", answer)


def _failed(request: Request, what: str) -> Outcome:
    return Outcome("failed", failure=f"{request.rid} ({request.fault.value}): {what}")


def _leave(server: Server, request: Request) -> None:
    """Wait for the first event of the stream no longer than a little while, or go away after a few events."""
    is_patient = request.moment > 0.3
    timeout_s = _TIMEOUT_S if is_patient else max(0.01, request.moment * _LIFE_S)
    num_lines = 2 * int(request.moment * request.new_tokens) if is_patient else 1
    url = f"{server.base_url}/generate"
    with suppress(TimeoutError), open_answer(url, request.body, timeout_s=timeout_s) as answer:
        for _ in range(num_lines):
            answer.readline()
