"""Logs of OpenAI chat requests: one request body a line (or file, or list item), with or without its answer.

README.md beside this file says how lines become sessions and which request fields are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

import msgspec

from pic_traces.lines import Line
from pic_traces.session import CallSpec, JsonValue, Message, Session, as_type

# Where loggers put the request when the line is an envelope around it (`body` is OpenAI's own batch format).
_ENVELOPES = ("body", "request")
_ANSWERS = ("response", "completion")
# Besides messages and tools, what the server's chat template may see. Sampling is the replay's business.
_PROMPT_OPTIONS = ("tool_choice", "chat_template_kwargs")


def is_request(value: dict[str, JsonValue]) -> bool:
    """Whether a line is meant to be a chat request, bare or in an envelope."""
    return "messages" in _body(value)


def name_by_line(line: Line) -> str:
    """The id of a session of one line, in a log of one file."""
    return f"line-{line.number:06d}"


def parse_requests(
    lines: Iterable[Line], source: str, name_line: Callable[[Line], str] = name_by_line
) -> Iterator[Session]:
    """Group the requests into sessions, ordered by their first line.

    Lines with the same `session_id` (in the line or in the request's `metadata`), or else the same `user`, are calls of
    one session, in the order of `lines`, whichever files they are from. A line with neither is a session of its own,
    called `name_line(line)`.

    Raises:
        TraceError: a line is not a chat request.
    """
    groups: dict[str, list[Line]] = {}
    seen: dict[bytes, JsonValue] = {}
    for line in lines:
        _share(_body(line.value), seen)
        groups.setdefault(_session_id(line) or name_line(line), []).append(line)
    for session_id, members in groups.items():
        yield _build(session_id, source, members)


def _body(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    for key in _ENVELOPES:
        inner = value.get(key)
        if isinstance(inner, dict) and "messages" in inner:
            return inner
    return value


def _share(body: dict[str, JsonValue], seen: dict[bytes, JsonValue]) -> None:
    """Puts one object in place of equal messages and equal tools: requests repeat their history, and a log is held
    whole until its last line is grouped. `seen` grows with the distinct messages, as the sessions themselves do."""
    messages = body.get("messages")
    if isinstance(messages, list):
        for index, message in enumerate(messages):
            messages[index] = seen.setdefault(_digest(message), message)
    if (tools := body.get("tools")) is not None:
        body["tools"] = seen.setdefault(_digest(tools), tools)


def _digest(value: JsonValue) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=16).digest()


def _session_id(line: Line) -> str | None:
    body = _body(line.value)
    metadata = body.get("metadata")
    for holder in (line.value, body, metadata if isinstance(metadata, dict) else {}):
        if isinstance(session_id := holder.get("session_id"), str | int) and session_id != "":
            return f"{session_id}"
    if isinstance(user := body.get("user"), str) and user:
        return f"user-{user}"
    return None


def _build(session_id: str, source: str, lines: list[Line]) -> Session:
    pool: list[Message] = []
    specs: list[CallSpec] = []
    for line in lines:
        body = _body(line.value)
        start = len(pool)
        pool += _messages(line, body)
        end = len(pool)
        answer = _answer(line)
        if answer is not None:
            pool.append(answer)
        tools = body.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise line.error(f"tools is {type(tools).__name__}; a list of tool schemas is expected")
        specs.append(
            CallSpec(
                spans=((start, end),),
                completion=None if answer is None else end,
                tools=tools or None,
                options={key: body[key] for key in _PROMPT_OPTIONS if body.get(key) is not None},
            )
        )
    return Session(session_id=session_id, source=source, pool=pool, specs=specs)


def _messages(line: Line, body: dict[str, JsonValue]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise line.error(f"no chat request: messages is {_brief(messages)}; a non-empty list of messages is expected")
    result: list[Message] = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise line.error(f"messages[{index}] is {_brief(message)}; an object with a role (string) is expected")
        result.append(message)
    return result


class _Choice(msgspec.Struct):
    message: Message


def _answer(line: Line) -> Message | None:
    """The recorded answer, whether it is a text, a message, or a whole chat completion response."""
    value = next((line.value[key] for key in _ANSWERS if line.value.get(key) is not None), None)
    if value is None:
        return None
    if isinstance(value, str):
        return {"role": "assistant", "content": value}
    if isinstance(value, dict):
        value = as_type(value.get("body"), dict[str, JsonValue]) or value
        if isinstance(value.get("role"), str):
            return value
        if choices := as_type(value.get("choices"), list[_Choice]):
            return choices[0].message
    raise line.error(
        f"the recorded answer is {_brief(value)}; a string, a message or a chat completion response is expected"
    )


def _brief(value: JsonValue) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
