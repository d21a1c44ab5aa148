"""One HTTP request to an OpenAI-compatible server: plain JSON calls, and a chat call read as a stream with clocks.

It uses `http.client`, whose sockets are cooperative once locust has patched them, and which hands on every line the
moment it arrives.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from pic_traces.session import JsonValue, as_type


class HttpReply(NamedTuple):
    """Status and decoded body of a plain call; `body` is None where it is not JSON."""

    status: int
    body: JsonValue
    text: str


@dataclass(slots=True)
class StreamReply:
    """The streamed answer of a chat call; filled while it runs, so that an interrupted call has its first part.

    Clocks are `time.monotonic()` values. `first_token_at` is when the first event with output arrived: text, a tool
    call, reasoning or logprobs; where there is none (the model ended at once), the event with the finish reason.
    `text` has all of these texts, those of tool calls too.
    """

    connect_at: float | None = None
    sent_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    status: int | None = None
    error: str | None = None
    request_id: str | None = None
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, JsonValue] | None = None
    extension: dict[str, JsonValue] = field(default_factory=dict)
    logprobs: list[dict[str, JsonValue]] = field(default_factory=list)


class Endpoint:
    """A server's address; every call opens a connection of its own. No proxy settings are read."""

    def __init__(self, base_url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        url = urlsplit(base_url.rstrip("/"))
        self._host = url.hostname or ""
        self._port = url.port
        self._tls = url.scheme == "https"
        self._prefix = url.path.removesuffix("/v1")
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def call(self, method: str, path: str, body: JsonValue = None) -> HttpReply:
        """One plain call.

        Raises:
            OSError, http.client.HTTPException: the server cannot be reached or broke off.
        """
        with closing(self._connect()) as connection:
            payload = None if body is None else msgspec.json.encode(body)
            connection.request(method, self._prefix + path, body=payload, headers=self._headers)
            response = connection.getresponse()
            raw = response.read()
        return HttpReply(response.status, _json_or_none(raw), raw.decode("utf-8", "replace"))

    def stream_chat(self, payload: bytes, reply: StreamReply) -> None:
        """POST a chat completion and fill `reply` as its events arrive; a server's refusal lands in `reply.error`.

        The connection is made before `sent_at` is taken, so that it does not count as time to first token.

        Raises:
            OSError, http.client.HTTPException: the server cannot be reached or broke off.
        """
        with closing(self._connect()) as connection:
            reply.connect_at = time.monotonic()
            connection.connect()
            reply.sent_at = time.monotonic()
            connection.request("POST", f"{self._prefix}/v1/chat/completions", body=payload, headers=self._headers)
            response = connection.getresponse()
            reply.status = response.status
            if response.status != http.client.OK:
                reply.error = error_message(response.read().decode("utf-8", "replace"))
                return
            finished = False
            for data in read_events(response):
                if data == b"[DONE]":
                    finished = True
                    break
                _take_event(reply, data, time.monotonic())
            if not finished and reply.error is None:
                raise http.client.IncompleteRead(b"", None)

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout_s)


def read_events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of each server-sent event; an event of several `data:` lines is joined by newlines."""
    lines: list[bytes] = []
    while line := response.readline():
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif not line and lines:
            yield b"\n".join(lines)
            lines = []
    if lines:
        yield b"\n".join(lines)


def error_message(text: str) -> str:
    """The message in an error body, in OpenAI's form or SGLang's, or the body itself."""
    body = _json_or_none(text.encode())
    if isinstance(body, dict):
        holder = body.get("error") if isinstance(body.get("error"), dict) else body
        if isinstance(holder, dict):
            for key in ("message", "detail"):
                if (message := holder.get(key)) is not None:
                    return message if isinstance(message, str) else msgspec.json.encode(message).decode()
    return text.strip()[:2000] or "(empty error body)"


def _json_or_none(raw: bytes) -> JsonValue:
    try:
        value: JsonValue = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value


def _take_event(reply: StreamReply, data: bytes, now: float) -> None:
    event = _json_or_none(data)
    if not isinstance(event, dict):
        reply.error = f"not JSON in the stream: {data[:200]!r}"
        return
    if event.get("error") is not None or event.get("object") == "error":
        reply.error = error_message(data.decode("utf-8", "replace"))
        holder = event.get("error") if isinstance(event.get("error"), dict) else event
        code = holder.get("code") if isinstance(holder, dict) else None
        reply.status = code if isinstance(code, int) else reply.status
        return
    reply.usage = as_type(event.get("usage"), dict[str, JsonValue]) or reply.usage
    reply.extension.update(as_type(event.get("sglext"), dict[str, JsonValue]) or {})
    reply.request_id = as_type(event.get("id"), str) or reply.request_id
    for choice in as_type(event.get("choices"), list[dict[str, JsonValue]]) or ():
        _take_choice(reply, choice, now)


def _take_choice(reply: StreamReply, choice: dict[str, JsonValue], now: float) -> None:
    delta = as_type(choice.get("delta"), dict[str, JsonValue]) or {}
    calls = as_type(delta.get("tool_calls"), list[dict[str, JsonValue]]) or []
    functions = [as_type(call.get("function"), dict[str, JsonValue]) or {} for call in calls]
    told = [delta.get("reasoning_content"), delta.get("content")]
    told += [function.get(key) for function in functions for key in ("name", "arguments")]
    texts = [text for one in told if (text := as_type(one, str))]
    logprobs = as_type(choice.get("logprobs"), dict[str, JsonValue]) or {}
    entries = as_type(logprobs.get("content"), list[dict[str, JsonValue]]) or []
    reason = as_type(choice.get("finish_reason"), str)
    reply.text += texts
    reply.logprobs += entries
    reply.finish_reason = reason or reply.finish_reason
    if reason == "abort":
        reply.error = "the server aborted the request"
    ends_unseen = reason is not None and reply.first_token_at is None
    if texts or entries or calls or ends_unseen:
        reply.first_token_at = reply.first_token_at or now
        reply.last_token_at = now
