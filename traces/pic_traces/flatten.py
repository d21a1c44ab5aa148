"""Recorded calls for chat templates: with tools as plain text if the template shows no tools.

Flattening is deterministic and keeps the number and order of messages. The replay sends the result to a server; an
encoder renders it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from pic_traces.session import JsonValue, Message, as_type

_RESULT_ROLES = ("tool", "function")


class Probe(NamedTuple):
    """A conversation with tools in it."""

    messages: list[Message]
    tools: list[JsonValue] | None


def shows_tools(render: Callable[[Probe], str | int | None]) -> bool:
    """Whether a chat template shows tool schemas, tool calls and tool results.

    Many templates silently drop what they do not know, so a refusal is no test. Instead three pairs of conversations
    are rendered, which differ only in a schema, only in a call, only in a result: every pair must come out different.

    Args:
        render: gives a conversation's prompt or its length; None where the template refuses the conversation.
    """
    short, long = "a", "a b c d e f g h i j k l m n o p"
    pairs = (
        (_schema_probe(short), _schema_probe(long)),
        (_turn_probe(f'{{"x": "{short}"}}', "done"), _turn_probe(f'{{"x": "{long}"}}', "done")),
        (_turn_probe('{"x": "a"}', short), _turn_probe('{"x": "a"}', long)),
    )
    prompts = ((render(one), render(other)) for one, other in pairs)
    return all(one is not None and other is not None and one != other for one, other in prompts)


def uses_tools(messages: list[Message], tools: list[JsonValue] | None) -> bool:
    """Whether a prompt has anything that `flatten_tools` would change."""
    return bool(tools) or any(m.get("tool_calls") or m.get("role") in _RESULT_ROLES for m in messages)


def flatten_tools(messages: list[Message], tools: list[JsonValue] | None) -> list[Message]:
    """The same prompt with system, user and assistant messages of plain text only.

    Tool schemas go to the end of the first system message (one is put in front where there is none), one JSON a line;
    an assistant's tool calls follow its text as `[tool call] name arguments`; a tool's result is a user message that
    begins with `[tool result]` and the tool's name where it is known.
    """
    names = _names(messages)
    result = [_flatten(message, names) for message in messages]
    if tools:
        listing = "Tools:\n" + "\n".join(_compact(tool) for tool in tools)
        if result and result[0].get("role") in ("system", "developer"):
            result[0] = {**result[0], "content": f"{_text(result[0].get('content'))}\n\n{listing}"}
        else:
            result.insert(0, {"role": "system", "content": listing})
    return result


def _schema_probe(filling: str) -> Probe:
    parameters: JsonValue = {"type": "object", "properties": {"x": {"type": "string"}}}
    function: JsonValue = {"name": "probe", "description": filling, "parameters": parameters}
    return Probe([{"role": "user", "content": "hello"}], [{"type": "function", "function": function}])


def _turn_probe(arguments: str, result: str) -> Probe:
    call: JsonValue = {"id": "call_1", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    messages: list[Message] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
    ]
    return Probe(messages, None)


def _names(messages: list[Message]) -> dict[str, str]:
    """The tools that were called, by the ids of the calls."""
    calls = [call for message in messages for call in _calls(message) if isinstance(call.get("id"), str)]
    functions = {str(call["id"]): as_type(call.get("function"), dict[str, JsonValue]) for call in calls}
    return {call_id: str(function.get("name", "")) for call_id, function in functions.items() if function is not None}


def _flatten(message: Message, names: dict[str, str]) -> Message:
    if message.get("role") in _RESULT_ROLES:
        name = message.get("name") or names.get(str(message.get("tool_call_id")), "")
        return {"role": "user", "content": f"[tool result] {name}".rstrip() + f"\n{_text(message.get('content'))}"}
    calls = _calls(message)
    if not calls:
        return message
    lines = [_call_line(call) for call in calls]
    text = _text(message.get("content"))
    flat: Message = {"role": str(message["role"]), "content": "\n".join([text, *lines] if text else lines)}
    if (thought := message.get("reasoning_content")) is not None:
        flat["reasoning_content"] = thought
    return flat


def _calls(message: Message) -> list[dict[str, JsonValue]]:
    return as_type(message.get("tool_calls"), list[dict[str, JsonValue]]) or []


def _call_line(call: dict[str, JsonValue]) -> str:
    function = as_type(call.get("function"), dict[str, JsonValue]) or call
    arguments = function.get("arguments", "")
    return f"[tool call] {function.get('name', '')} {arguments if isinstance(arguments, str) else _compact(arguments)}"


def _text(content: JsonValue) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict))
    return _compact(content)


def _compact(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
