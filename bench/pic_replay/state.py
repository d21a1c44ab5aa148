"""The replay's state in its process: which session is next, the open record file, the progress bar, when to stop.

Users (locust's) drive it.
"""

from __future__ import annotations

import http.client
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import IO, NamedTuple

import msgspec
from pic_traces.errors import ReplayError
from pic_traces.session import Call, Session
from tqdm import tqdm

from pic_replay.client import Endpoint, StreamReply
from pic_replay.options import ReplayOptions
from pic_replay.prompt import build_body, prompt_key, prompt_part
from pic_replay.records import RequestRecord, Status
from pic_replay.result import Asked, build_record
from pic_replay.server import ServerInfo, count_prompt_tokens, too_long

# A server that refuses this many connections in a row is gone; the rest of the trace would only be failures.
_GONE_AFTER = 3


Turn = Callable[[], AbstractContextManager[float | None]]
"""The context in which a call is sent; it may give the time from which the call counts as scheduled."""


class Target(NamedTuple):
    """The server and how prompts are put to it."""

    endpoint: Endpoint
    info: ServerInfo
    options: ReplayOptions
    flatten: bool


class Verdict(NamedTuple):
    """How a finished request counts; `num_tokens` is the prompt's length where it had to be asked for."""

    status: Status
    reason: str | None = None
    num_tokens: int | None = None


class Replay:
    """One run over a list of sessions. Used from greenlets of one thread, so it needs no locks.

    Args:
        target: the server.
        sessions: the sessions to replay.
        records_file: gets a line per request.
        progress_file: gets the progress bar.
        turn: surrounds each call.
    """

    def __init__(
        self,
        target: Target,
        sessions: list[Session],
        records_file: IO[bytes],
        progress_file: IO[str],
        turn: Turn = nullcontext,
    ) -> None:
        self.records: list[RequestRecord] = []
        self.stopped: str | None = None
        self.planned = sum(session.num_calls for session in sessions)
        self.clock_zero = 0.0
        self._target = target
        self._waiting = deque(sessions)
        self._unfinished = len(sessions)
        self._refused = 0
        self._file = records_file
        self._progress_file = progress_file
        self._turn = turn
        self._bar: tqdm[object] | None = None
        self._on_end: Callable[[], None] = lambda: None

    def warm_up(self, calls: list[Call]) -> None:
        """Send unrelated prompts, then start the clock.

        Raises:
            ReplayError: the server refused one; every call of the trace would most likely meet the same.
        """
        done: list[tuple[Asked, StreamReply, float]] = []
        for call in calls:
            asked, body = self._ask(call, scheduled_at=time.monotonic(), warmup=True)
            reply = StreamReply()
            self._send(body, reply)
            if reply.error is not None:
                raise ReplayError(f"the server refused the warm-up request (HTTP {reply.status}): {reply.error}")
            done.append((asked, reply, time.monotonic()))
        self.clock_zero = time.monotonic()
        for asked, reply, finished_at in done:
            self._keep(asked, reply, Verdict(Status.OK), finished_at)
        self._bar = tqdm(
            total=self.planned,
            unit="call",
            file=self._progress_file,
            disable=self._target.options.quiet,
            dynamic_ncols=True,
            # A log file gets a line now and then instead of a bar that redraws itself.
            mininterval=0.2 if self._progress_file.isatty() else 15,
        )

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call back once every session has ended or the replay was stopped."""
        self._on_end = callback

    def take_session(self) -> Session | None:
        """The next session that nobody has begun; None when there is none left or the replay was stopped."""
        return self._waiting.popleft() if self._waiting and self.stopped is None else None

    def end_session(self) -> None:
        """Report that a taken session is done."""
        self._unfinished -= 1
        if self._unfinished == 0:
            self._on_end()

    def stop(self, why: str) -> None:
        """Begin no further call."""
        if self.stopped is None:
            self.stopped = why
            self._on_end()

    def perform(self, call: Call, *, scheduled_at: float) -> None:
        """Send one call, wait for its end and write its record, also after an error or an interrupt."""
        with self._turn() as came_at:
            self._perform(call, scheduled_at if came_at is None else came_at)

    def _perform(self, call: Call, scheduled_at: float) -> None:
        asked, body = self._ask(call, scheduled_at=scheduled_at, warmup=False)
        reply = StreamReply()
        verdict = Verdict(Status.INTERRUPTED)
        finished_at: float | None = None
        try:
            self._send(body, reply)
            finished_at = time.monotonic()
            verdict = self._judge(call, reply)
        finally:
            self._keep(asked, reply, verdict, finished_at or time.monotonic())
        if self._refused >= _GONE_AFTER:
            self.stop(f"the server is gone: {self._refused} connections in a row failed, the last with: {reply.error}")

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.close()

    def _ask(self, call: Call, *, scheduled_at: float, warmup: bool) -> tuple[Asked, bytes]:
        part = prompt_part(call, flatten=self._target.flatten)
        body = build_body(part, self._target.options, self._target.info)
        asked = Asked(
            session_id=call.session_id,
            call=call.index,
            agent=call.agent,
            warmup=warmup,
            prompt_key=prompt_key(part),
            num_messages=len(call.messages),
            scheduled_at=scheduled_at,
        )
        return asked, msgspec.json.encode(body)

    def _send(self, body: bytes, reply: StreamReply) -> None:
        try:
            self._target.endpoint.stream_chat(body, reply)
        except (OSError, http.client.HTTPException) as error:
            reply.error = f"{type(error).__name__}: {error}"
        self._refused = self._refused + 1 if reply.sent_at is None else 0

    def _judge(self, call: Call, reply: StreamReply) -> Verdict:
        if reply.error is None:
            return Verdict(Status.OK)
        if reply.status is None or not 400 <= reply.status < 500:
            return Verdict(Status.FAILED)
        endpoint, info, options, flatten = self._target
        num_tokens = None
        if info.can_tokenize:
            num_tokens = count_prompt_tokens(endpoint, {"model": info.model, **prompt_part(call, flatten=flatten)})
        reason = too_long(reply.error, num_tokens, options.max_tokens, info.context_len)
        return Verdict(Status.FAILED if reason is None else Status.SKIPPED, reason, num_tokens)

    def _keep(self, asked: Asked, reply: StreamReply, verdict: Verdict, finished_at: float) -> None:
        record = build_record(
            asked,
            reply,
            verdict.status,
            clock_zero=self.clock_zero,
            finished_at=finished_at,
            is_sglang=self._target.info.is_sglang,
            reason=verdict.reason,
            num_tokens=verdict.num_tokens,
        )
        self.records.append(record)
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()
        if self._bar is not None:
            measured = [r for r in self.records if not r.warmup]
            self._bar.set_postfix(
                tokens=sum(r.prompt_tokens or 0 for r in measured if r.status is Status.OK),
                failed=sum(r.status is Status.FAILED for r in measured),
                skipped=sum(r.status is Status.SKIPPED for r in measured),
                refresh=False,
            )
            self._bar.update()
