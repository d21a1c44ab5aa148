"""Sends prompts to a server that speaks OpenAI's API: cold, among others, again, and in their session's order.

A prompt is cold under a `cache_salt` that nobody used, where the server obeys it. Where it does not, it is cold behind
a first line that nobody used, when it is sent for the first time.
"""

from __future__ import annotations

import http.client
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from itertools import product
from typing import NamedTuple

import msgspec
from pic_replay.client import Endpoint, error_message
from pic_replay.prompt import prompt_part
from pic_replay.server import ServerInfo, ask_server, shows_tools, too_long
from pic_traces.errors import ReplayError
from pic_traces.flatten import uses_tools
from pic_traces.session import Call, JsonValue, Message, as_type

from pic_bench.report.stats import merge_tokens

AT_ONCE = 8
"""Requests side by side in the sending among others."""
_NUM_TOP = (20, 5, 0)
"""Logprobs a token: OpenAI's limit, that of vLLM's servers once, and none."""


class Cold(Enum):
    """What makes a prompt cold."""

    SALT = "a cache_salt of its own"
    FIRST_LINE = "a first line of its own, sent for the first time"


class Sent(NamedTuple):
    """A greedy answer, and what the server says of its prompt."""

    text: str
    tokens: list[str]
    tops: list[dict[str, float]]
    """Each token's likeliest alternatives with their log probabilities; empty where the server gives none."""
    prompt_tokens: int
    cached_tokens: int | None
    """None where the server does not say."""


class Sendings(NamedTuple):
    """The answers to one call."""

    call: Call
    cold: Sent
    again: Sent
    """The same prompt, the moment after."""
    others: Sent
    """Cold like `cold`, among other requests; with `Cold.FIRST_LINE` cached like `again`."""
    grown: Sent | None
    """After the earlier calls of its session; None for a first call and with `Cold.FIRST_LINE`."""


class Sender:
    """Prompts to one server.

    Args:
        model: the model's name; None for the server's first.
        extra_body: merged into every request.

    Raises:
        ReplayError: no such server answers there, it refuses the first call, or it caches nothing.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        base_url: str,
        calls: Sequence[Call],
        *,
        model: str | None,
        max_tokens: int,
        extra_body: dict[str, JsonValue],
    ) -> None:
        self.info: ServerInfo = ask_server(endpoint, base_url, model)
        self._endpoint, self._max_tokens, self._extra_body = endpoint, max_tokens, extra_body
        has_tools = any(uses_tools(call.messages, call.tools) for call in calls)
        self._flatten = has_tools and not shows_tools(endpoint, self.info)
        self.cold, self.num_top, self.tells_cached = self._learn(calls)
        self.skipped: list[str] = []
        """Why calls were left out."""

    def send_all(self, calls: Sequence[Call]) -> list[Sendings]:
        """Send each call cold and again; then all at once; then each session's calls in order.

        Raises:
            ReplayError: the server refused a call for another reason than its length, or nobody answers.
        """
        found = list[tuple[Call, str, Sent, Sent]]()
        for call in calls:
            key = secrets.token_hex(8)
            if (cold := self._send(call, key)) is not None and (again := self._send(call, key)) is not None:
                found.append((call, key, cold, again))
        is_salted = self.cold is Cold.SALT
        with ThreadPoolExecutor(AT_ONCE) as pool:
            keys = [secrets.token_hex(8) if is_salted else key for _, key, _, _ in found]
            others = list(pool.map(self._send, [call for call, *_ in found], keys))
        session_keys = {call.session_id: secrets.token_hex(8) for call, *_ in found}
        seen, sendings = set[str](), list[Sendings]()
        for (call, _, cold, again), other in zip(found, others, strict=True):
            grown = self._send(call, session_keys[call.session_id]) if is_salted else None
            assert other is not None
            sendings.append(Sendings(call, cold, again, other, grown if call.session_id in seen else None))
            seen.add(call.session_id)
        return sendings

    def _learn(self, calls: Sequence[Call]) -> tuple[Cold, int, bool]:
        """What makes a prompt cold here, how many logprobs there are, and whether cached tokens are told."""
        refusals = dict[str, None]()
        for call, num_top, cold in product(calls[:1], _NUM_TOP, Cold):
            self.cold, self.num_top = cold, num_top
            answers, (one, other) = list[Sent](), (secrets.token_hex(8), secrets.token_hex(8))
            for key in (one, one, other):
                answer = self._ask(call, key)
                if isinstance(answer, str):
                    refusals[answer] = None
                    break
                answers.append(answer)
            if len(answers) < 3:
                continue
            cached = [answer.cached_tokens for answer in answers]
            if cached == [None] * 3:
                return Cold.FIRST_LINE, num_top, False
            first, again, elsewhere = (count or 0 for count in cached)
            if not again:
                raise ReplayError(
                    f"of a prompt of {answers[0].prompt_tokens} tokens that was sent twice the server reports 0 cached "
                    "tokens: its prefix cache is off, or keeps only longer prompts; there is nothing to check."
                )
            if cold is Cold.FIRST_LINE or first == elsewhere == 0:
                return cold, num_top, True
        raise ReplayError(f"the server refuses the first call: {'; '.join(refusals)}")

    def _send(self, call: Call, key: str) -> Sent | None:
        """The answer; None for a call that is too long for the model."""
        answer = self._ask(call, key)
        if isinstance(answer, Sent):
            # SGLang says nothing where nothing was cached.
            told = (answer.cached_tokens or 0) if self.tells_cached else None
            return answer._replace(cached_tokens=told)
        if too_long(answer, None, self._max_tokens, self.info.context_len) is None:
            raise ReplayError(f"session {call.session_id}, call {call.index}: the server refuses it: {answer}")
        self.skipped.append(answer)
        return None

    def _ask(self, call: Call, key: str) -> Sent | str:
        """The answer to a call in the namespace, or behind the line, that `key` names; a text is a refusal's."""
        body: dict[str, JsonValue] = {"model": self.info.model, **prompt_part(call, flatten=self._flatten)}
        body |= {"temperature": 0, "max_tokens": self._max_tokens}
        if self.num_top:
            body |= {"logprobs": True, "top_logprobs": self.num_top}
        if self.cold is Cold.SALT:
            body["cache_salt"] = key
        else:
            body["messages"] = _behind(f"[{key}]\n", body["messages"])
        try:
            reply = self._endpoint.call("POST", "/v1/chat/completions", body | self._extra_body)
        except (OSError, http.client.HTTPException) as error:
            raise ReplayError(f"the server stopped answering: {error}") from error
        if reply.status != http.client.OK:
            return f"HTTP {reply.status}: {error_message(reply.text)}"
        return _read(reply.body, reply.text)


def _behind(line: str, messages: JsonValue) -> JsonValue:
    """The messages with a line before the first text."""
    first, *rest = msgspec.convert(messages, list[Message]) or [{"role": "user", "content": ""}]
    content = first.get("content")
    parts: JsonValue = [{"type": "text", "text": line}, *content] if isinstance(content, list) else None
    return [{**first, "content": parts or f"{line}{content or ''}"}, *rest]


class _Token(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_Top] = []


class _Top(msgspec.Struct):
    token: str
    logprob: float


def _read(body: JsonValue, text: str) -> Sent | str:
    """The answer in a completion; a text says what is wrong with it."""
    holder = body if isinstance(body, dict) else {}
    choices = as_type(holder.get("choices"), list[dict[str, JsonValue]])
    usage = as_type(holder.get("usage"), dict[str, JsonValue]) or {}
    prompt_tokens = as_type(usage.get("prompt_tokens"), int)
    if not choices or prompt_tokens is None:
        return f"no completion with its usage: {text[:200]!r}"
    message = as_type(choices[0].get("message"), dict[str, JsonValue]) or {}
    logprobs = as_type(choices[0].get("logprobs"), dict[str, JsonValue]) or {}
    tokens = as_type(logprobs.get("content"), list[_Token]) or []
    details = as_type(usage.get("prompt_tokens_details"), dict[str, JsonValue]) or {}
    kept = {key: message[key] for key in ("reasoning_content", "content") if message.get(key)}
    calls = [each.get("function") for each in as_type(message.get("tool_calls"), list[dict[str, JsonValue]]) or []]
    return Sent(
        text=msgspec.json.encode([kept, calls]).decode(),
        tokens=[token.token for token in tokens],
        tops=[merge_tokens([(top.token, top.logprob) for top in token.top_logprobs]) for token in tokens],
        prompt_tokens=prompt_tokens,
        cached_tokens=as_type(details.get("cached_tokens"), int),
    )
