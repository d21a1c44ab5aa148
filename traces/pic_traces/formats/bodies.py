"""Request bodies of the three APIs: where loggers put them, their answers, and their usage."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pic_traces.formats.reader import Dict
from pic_traces.session import JsonValue, as_type

# Where loggers and proxies put the request (`body` is OpenAI's own batch format), and what was answered.
_REQUESTS = (
    "body", "request", "request_body", "requestBody", "req", "payload", "json", "json_body", "data", "obj", "kwargs",
    "parsed_body", "proxy_server_request", "postData", "raw_request", "original_request", "text", "content", "string",
)  # fmt: skip
_ANSWERS = (
    "response", "completion", "output", "result", "response_body", "responseBody", "resp", "raw_response",
    "original_response",
)  # fmt: skip
_INNER = ("body", "body_raw", "json", "data", "parsed_body", "content", "text", "string", "response")
_MAX_DEPTH = 3


def find_body(value: Dict, is_body: Callable[[Dict], bool], depth: int = _MAX_DEPTH) -> Dict | None:
    """The request body in a line, bare or in envelopes, also where it is JSON in a string; None if there is none."""
    if is_body(value):
        return value
    if depth == 0:
        return None
    inner = (as_object(value[key]) for key in _REQUESTS if value.get(key) is not None)
    found = (find_body(one, is_body, depth - 1) for one in inner if one)
    return next((body for body in found if body is not None), None)


def find_answer(value: Dict) -> JsonValue:
    """What was answered, as it was recorded beside the request; None if nothing was."""
    answer = next((value[key] for key in _ANSWERS if value.get(key) is not None), None)
    for _ in range(_MAX_DEPTH):
        decoded = as_object(answer)
        if not decoded or is_message(decoded):
            break
        inner = next((decoded[key] for key in _INNER if decoded.get(key)), None)
        if inner is None:
            break
        answer = inner
    return as_object(answer) or answer


def is_message(value: Dict) -> bool:
    """Whether an object is an answer itself, not an envelope around one."""
    return bool({"role", "choices", "output", "error"} & value.keys())


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


def prompt_tokens_of(*holders: JsonValue) -> int | None:
    """The length of the prompt as an API reports it, cached tokens included."""
    for holder in map(as_object, holders):
        usage = as_object(holder.get("usage")) or holder
        for key in ("prompt_tokens", "input_tokens"):
            count = as_type(usage.get(key), int)
            if count:
                # Anthropic's counts the cached tokens beside the others; OpenAI's `input_tokens` includes them.
                beside = (as_type(usage.get(f"cache_{what}_input_tokens"), int) for what in ("read", "creation"))
                return count + sum(number or 0 for number in beside)
    return None


def session_of(*holders: Dict) -> str | None:
    """The id that calls of one conversation share, wherever clients and gateways put it."""
    for holder in holders:
        for one in (holder, as_object(holder.get("metadata")), as_object(holder.get("extra_body"))):
            for key in ("session_id", "conversation_id", "thread_id", "litellm_session_id", "trace_id"):
                if isinstance(found := one.get(key), str | int) and found != "":
                    return f"{found}"
    for holder in holders:
        user = as_object(holder.get("metadata")).get("user_id") or holder.get("user")
        if isinstance(user, str) and user:
            return as_type(as_object(user).get("session_id"), str) or f"user-{user}"
    return None


def brief(value: JsonValue) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
