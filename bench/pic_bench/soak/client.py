"""Sends the requests of a soak with their faults, and compares answers with a stock server's.

Those of `off` requests are compared, each as soon as it is there. Both servers compute in float32, but in other
batches, so sums are rounded differently: log-probabilities may differ by `TOLERANCE`, and a greedy answer may go on
with another token only where the stock server's two differ by no more than rounding can turn round. One wrong row among
hundreds moves them further: `control` shows it.
"""

from __future__ import annotations

import http.client
import math
import random
import threading
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from pic_bench.compare.server import Server
from pic_bench.compare.server import request as open_answer
from pic_bench.soak.load import Fault, Request
from pic_bench.soak.pair import Pair
from sglang_pic.errors import BenchError

TOLERANCE = 2e-4
_TIMEOUT_S = 300.0
_ABORTED = ("bort", "KVPoll.WaitingForInput")
"""In an error that an abort explains; the second is a decode server's that was not told of it (soak.toml)."""
# About what a request lives under load.
_LIFE_S = 2.0


class Outcome(NamedTuple):
    """The outcome of a request."""

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
        if request.fault is Fault.ABORT and any(said in str(error) for said in _ABORTED):
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

    def leave(server: Server, body: object) -> None:
        with suppress(TimeoutError), open_answer(f"{server.base_url}/generate", body, timeout_s=timeout_s) as answer:
            for _ in range(num_lines):
                answer.readline()

    if isinstance(server, Pair):
        server.on_both(leave, request.body)
    else:
        leave(server, request.body)


class Judge:
    """Asks the stock server for what clients of the other one were answered; safe to call from several threads."""

    def __init__(self, stock: Server) -> None:
        self._stock = stock
        self.verdicts: list[str | None] = []
        """The difference of every compared answer."""

    def compare(self, request: Request, answer: dict[str, Any]) -> None:
        """Have the stock server answer the same, and note what differs by more than rounding."""
        try:
            found = difference(self._ask(request), answer)
        except (BenchError, OSError) as error:
            found = f"not compared: {error}"
        self.verdicts.append(None if found is None else f"{request.rid}: {found}")

    def control(self, request: Request, seed: int) -> bool:
        """Whether an answer to a prompt with one other token in it is told from the right one."""
        rng = random.Random(seed)
        other = list(request.prompt)
        place = rng.randrange(len(other) // 4, len(other) // 2)
        other[place] = (other[place] + rng.randrange(1, 1000)) % 40_000 + 1000
        right, wrong = self._ask(request), self._ask(request._replace(prompt=other))
        return difference(right, wrong) is not None

    def _ask(self, request: Request) -> dict[str, Any]:
        return dict(self._stock.post("/generate", request._replace(pic=None).body))


def difference(stock: dict[str, Any], answer: dict[str, Any]) -> str | None:
    """The differences of an answer from the stock server's that exceed rounding."""
    pair = _places(stock), _places(answer)
    if len(pair[0]) != len(pair[1]):
        return f"{len(pair[1])} tokens, stock has {len(pair[0])}"
    for place, ((right_token, right), (found_token, found)) in enumerate(zip(*pair, strict=True)):
        # A token that only one of them has among its likeliest is at most as likely as the last one of the other.
        floors = min(right.values()), min(found.values())
        for token in right.keys() | found.keys():
            apart = abs(right.get(token, floors[0]) - found.get(token, floors[1]))
            if not apart <= TOLERANCE:
                return f"token {place}: log-probability of {token} off by {apart:.2e}"
        if right_token != found_token:
            gap = right[right_token] - right.get(found_token, -math.inf)
            # Behind a tie, which rounding decides, the two go on with other tokens: no more can be compared.
            return None if gap <= 2 * TOLERANCE else f"token {place}: {found_token} instead of {right_token}"
    return None


def _places(answer: dict[str, Any]) -> list[tuple[int, dict[int, float]]]:
    """The chosen token of every place, and the log-probabilities of the likeliest."""
    meta = answer["meta_info"]
    both = zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
    return [(chosen[1], {token: logprob for logprob, token, *_ in top}) for chosen, top in both]
