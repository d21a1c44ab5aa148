"""Asks the server before a replay starts for its model, context length, kind, and the fields its template reads."""

from __future__ import annotations

import http.client
import re

import msgspec
from pic_traces import flatten
from pic_traces.errors import ReplayError
from pic_traces.flatten import Probe
from pic_traces.session import JsonValue, T, as_type

from pic_replay.client import Endpoint, HttpReply

# How SGLang, vLLM and OpenAI word it.
_TOO_LONG = re.compile(
    r"context length|context_length|longer than the model|maximum allowed length|max_model_len", re.I
)


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server as it described itself; None where it did not say."""

    model: str
    is_sglang: bool
    version: str | None
    context_len: int | None
    can_tokenize: bool


def ask_server(endpoint: Endpoint, base_url: str, model: str | None) -> ServerInfo:
    """Ask the server for its model, context length and kind.

    Raises:
        ReplayError: nobody answers at `base_url`, or the answer is no OpenAI-compatible server's.
    """
    try:
        models = endpoint.call("GET", "/v1/models")
        info = endpoint.call("GET", "/model_info")
        version = endpoint.call("GET", "/server_info") if info.status == 200 else None
        tokenized = endpoint.call("POST", "/v1/tokenize", {"messages": [{"role": "user", "content": "hello"}]})
    except (OSError, http.client.HTTPException) as error:
        raise ReplayError(f"base_url={base_url!r}: no server answers there: {error}; start it first.") from error
    cards = models.body.get("data") if isinstance(models.body, dict) else None
    if models.status != 200 or not isinstance(cards, list) or not cards or not isinstance(cards[0], dict):
        raise ReplayError(
            f"base_url={base_url!r}: GET /v1/models gave HTTP {models.status}: {models.text[:200]!r}; "
            "an OpenAI-compatible server is needed (401: set the API key)."
        )
    card = next((card for card in cards if isinstance(card, dict) and card.get("id") == model), cards[0])
    return ServerInfo(
        model=model or str(cards[0].get("id")),
        is_sglang=_field(info, "model_path", str) is not None,
        version=_field(version, "version", str),
        context_len=as_type(card.get("max_model_len"), int),
        can_tokenize=_field(tokenized, "count", int) is not None,
    )


def count_prompt_tokens(endpoint: Endpoint, body: dict[str, JsonValue]) -> int | None:
    """The length of the prompt that a chat request becomes, by the server's own template; None if it will not say."""
    try:
        return _field(endpoint.call("POST", "/v1/tokenize", body), "count", int)
    except (OSError, http.client.HTTPException):
        return None


def shows_tools(endpoint: Endpoint, info: ServerInfo) -> bool:
    """Whether the chat template shows tool schemas, tool calls and tool results.

    Raises:
        ReplayError: the server stopped answering.
    """
    return flatten.shows_tools(lambda probe: _measure(endpoint, info, probe))


def too_long(message: str, num_tokens: int | None, max_tokens: int, context_len: int | None) -> str | None:
    """The reason to skip a request that the server refused, or None if it was refused for something else."""
    if num_tokens is not None and context_len is not None and num_tokens + max_tokens > context_len:
        return f"prompt of {num_tokens} tokens + {max_tokens} output tokens > context of {context_len}"
    if _TOO_LONG.search(message):
        return message
    return None


def _field(reply: HttpReply | None, name: str, kind: type[T]) -> T | None:
    """A field of a successful answer; None where there is none of this type."""
    body = reply.body if reply is not None and reply.status == 200 else None
    return as_type(body.get(name), kind) if isinstance(body, dict) else None


def _measure(endpoint: Endpoint, info: ServerInfo, probe: Probe) -> int | None:
    request: dict[str, JsonValue] = {"model": info.model, "messages": [*probe.messages]}
    if probe.tools:
        request["tools"] = probe.tools
    try:
        if info.can_tokenize:
            return _field(endpoint.call("POST", "/v1/tokenize", request), "count", int)
        reply = endpoint.call("POST", "/v1/chat/completions", {**request, "max_tokens": 1, "temperature": 0})
    except (OSError, http.client.HTTPException) as error:
        raise ReplayError(f"the server stopped answering while its chat template was probed: {error}") from error
    return as_type((_field(reply, "usage", dict) or {}).get("prompt_tokens"), int)
