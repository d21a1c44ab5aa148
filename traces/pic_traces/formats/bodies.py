"""Request bodies of the three APIs: where loggers put them, their answers, and their usage."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pic_traces.formats.reader import Dict
from pic_traces.session import JsonValue, as_type

# Where loggers and proxies put what was answered; no request is looked for there.
ANSWERS = (
    "response", "completion", "output", "outputs", "result", "response_body", "responseBody", "resp", "raw_response",
    "original_response", "full_response",
)  # fmt: skip
_INNER = (
    "body", "body_raw", "json", "data", "parsed_body", "content", "text", "string", "response", "outputBodyJson",
    "generations",
)  # fmt: skip
_MAX_DEPTH = 4
_FIRST_ERROR, _CLIENT_LEFT = 400, 499
# How tracers name the kind of a span or a run, and what in one is no model's call.
TRACED = {"trace_id", "traceId", "run_type", "span_id", "root_span_id", "parent_run_id", "span_attributes"}
_OTHER_SPANS = {
    "chain", "tool", "retriever", "span", "event", "agent", "task", "function", "workflow", "general", "guardrail",
    "evaluator", "prompt", "parser", "score", "eval", "embedding",
}  # fmt: skip
_PROMPT_TOKENS = (
    "prompt_tokens", "input_tokens", "promptTokenCount", "inputTokens", "inputTokenCount", "promptTokens", "input",
)  # fmt: skip
_CACHED_BESIDE = (
    "cache_read_input_tokens", "cache_creation_input_tokens", "cacheReadInputTokens", "cacheWriteInputTokens",
    "cacheRead", "cacheWrite",
)  # fmt: skip
_USAGES = ("usage", "usageMetadata", "usage_metadata", "usageDetails", "metrics", "tokens")


class Found(NamedTuple):
    """A request body, and the fields of all that is around it, the nearest before others."""

    body: Dict
    around: Dict


def find_body(value: Dict, as_body: Callable[[Dict], Dict | None], depth: int = _MAX_DEPTH) -> Found | None:
    """The request body in a line: the first object that is one, bare or in envelopes, also as JSON in a string.

    Args:
        value: the line.
        as_body: gives an object as a body; None if it is none.
        depth: how many envelopes may be around it.
    """
    level: list[tuple[Dict, Dict]] = [(value, {})]
    for _ in range(depth + 1):
        found = next((Found(body, around or one) for one, around in level if (body := as_body(one)) is not None), None)
        if found is not None:
            return found
        level = [
            (inner, {**around, **one})
            for one, around in level
            for key in one
            if key not in ANSWERS and (inner := as_object(one[key]))
        ]
    return None


def is_other_span(value: Dict) -> bool:
    """Whether a tracer's span or run is of a tool, an agent or a framework's step, whose input is no prompt."""
    kinds = (value.get("run_type"), value.get("type"), as_object(value.get("span_attributes")).get("type"))
    return bool(TRACED & value.keys()) and any(f"{kind}".lower() in _OTHER_SPANS for kind in kinds)


def find_answer(value: Dict) -> JsonValue:
    """What was answered, as it was recorded beside the request; None if nothing was."""
    return _inside(first_of(value, *ANSWERS), _MAX_DEPTH)


def _inside(answer: JsonValue, depth: int) -> JsonValue:
    whole = as_object(answer)
    key = next((key for key in _INNER if whole.get(key)), None) if depth and not is_message(whole) else None
    found = _inside(whole[key], depth - 1) if key else whole or answer
    # What a model wrote may be JSON, too.
    return answer if isinstance(answer, str) and not _is_response(found) else found


def _is_response(value: JsonValue) -> bool:
    """Whether a value is a response of an API, its message, or its stream, and not any other JSON."""
    while isinstance(value, list):
        value = next((one for one in value if isinstance(one, dict | list)), None)
    if not isinstance(value, dict):
        return isinstance(value, str) and value.startswith(("data:", "event:"))
    nested = (value.get(key) for key in ("choices", "candidates", "output", "message", "error"))
    return value.get("role") in ("assistant", "model") or any(isinstance(one, dict | list) for one in nested)


def was_refused(*holders: JsonValue) -> bool:
    """Whether a call was answered with an error, which no cache remembers; 499 is a client that went away.

    Args:
        holders: the answer and what it was recorded in.
    """
    for holder in as_objects([*holders]):
        for key in ("status_code", "statusCode", "http_status", "response_status", "status"):
            status = as_object(holder.get(key)).get("code", holder.get(key))
            if str(status).upper() in ("ERROR", "FAILURE", "FAILED", "STATUS_CODE_ERROR"):
                return True
            code = int(f"{status}") if f"{status}".isdigit() else 0
            if code >= _FIRST_ERROR and code != _CLIENT_LEFT:
                return True
        if holder.get("error") and not any(holder.get(key) for key in (*ANSWERS, "choices", "content", "messages")):
            return True
    return False


def is_message(value: Dict) -> bool:
    """Whether an object is an answer itself, not an envelope around one."""
    return bool({"role", "choices", "output", "error", "candidates", "message"} & value.keys())


def as_object(value: JsonValue) -> Dict:
    """An object, or the object that a string holds as JSON; empty for anything else."""
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}


def as_objects(value: JsonValue) -> list[Dict]:
    """The objects of a list; empty for anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def as_list(value: JsonValue) -> list[JsonValue]:
    """A list, or the list that a string holds as JSON; empty for anything else."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError):
            return []
    return value if isinstance(value, list) else []


def first_of(value: Dict, *keys: str) -> JsonValue:
    """The first of these fields that has a value; None if none has."""
    return next((value[key] for key in keys if value.get(key) is not None), None)


def prompt_tokens_of(*holders: JsonValue) -> int | None:
    """The length of the prompt as an API reports it, cached tokens included."""
    for holder in as_objects([*holders]):
        usage = next((found for key in _USAGES if (found := as_object(holder.get(key)))), holder)
        for key in _PROMPT_TOKENS:
            if count := as_type(usage.get(key), int):
                # Anthropic's counts the cached tokens beside the others; OpenAI's `input_tokens` includes them.
                return count + sum(as_type(usage.get(name), int) or 0 for name in _CACHED_BESIDE)
    return None


def session_of(*holders: Dict) -> str | None:
    """The id that calls of one conversation share, wherever clients and gateways put it."""
    for holder in holders:
        for one in (holder, as_object(holder.get("metadata")), as_object(holder.get("extra_body"))):
            for key in (
                "session_id",
                "conversation_id",
                "thread_id",
                "litellm_session_id",
                "trace_id",
                "sessionId",
                "traceId",
            ):
                if isinstance(found := one.get(key), str | int) and found != "":
                    return f"{found}"
    for holder in holders:
        user = as_object(holder.get("metadata")).get("user_id") or holder.get("user")
        if isinstance(user, str) and user:
            return as_type(as_object(user).get("session_id"), str) or f"user-{user}"
    return None


def mark_of(value: Dict) -> str | None:
    """An id that only records of one call have in common: of the request, or of its response."""
    response = as_object(value.get("response"))
    holders = (value, as_object(value.get("request")), response, as_object(response.get("body")))
    names = ("request_id", "requestId", "x-request-id", "litellm_call_id", "rid")
    found = next((one[name] for one in holders for name in names if isinstance(one.get(name), str) and one[name]), None)
    found = found or next((one["id"] for one in holders[2:] if isinstance(one.get("id"), str)), None)
    return found if isinstance(found, str) else None


def brief(value: JsonValue) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
