"""OpenAI's Responses API, as SGLang serves it: its items as chat messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pic_traces.formats import parts
from pic_traces.formats.bodies import (
    Found,
    as_objects,
    find_answer,
    find_body,
    is_other_span,
    mark_of,
    prompt_tokens_of,
    session_of,
    was_refused,
)
from pic_traces.formats.chat import tools_of
from pic_traces.formats.reader import Dict, Reader, Request
from pic_traces.formats.stream import joined
from pic_traces.formats.times import time_of
from pic_traces.lines import Line
from pic_traces.session import JsonValue, Message

_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_OWN_KEYS = ("instructions", "previous_response_id", "reasoning", "max_output_tokens", "store", "include", "tools")


class Responses(Reader):
    """Implements `Reader`. Requests that name an earlier response are read if that one is in the log."""

    name = "requests of the Responses API (`input`)"
    is_per_file = False

    def __init__(self) -> None:
        self._items: dict[str, list[Dict]] = {}

    @staticmethod
    def recognizes(line: Line) -> bool:
        return not is_other_span(line.value) and _found(line.value) is not None

    def take(self, line: Line) -> Iterator[Request]:
        if (found := _found(line.value)) is None:
            return
        line, body = line._replace(value=found.around), found.body
        recorded = joined(find_answer(line.value))
        answer = recorded if isinstance(recorded, dict) else {}
        earlier = body.get("previous_response_id")
        if isinstance(earlier, str) and earlier not in self._items:
            raise line.error("its `previous_response_id` names a response that is not in the log")
        history = self._items[earlier] if isinstance(earlier, str) else []
        asked: JsonValue = body["input"]
        items = [*history, *([{"role": "user", "content": asked}] if isinstance(asked, str) else as_objects(asked))]
        output = as_objects(answer.get("output"))
        if isinstance(answer.get("id"), str):
            self._items[str(answer["id"])] = [*items, *output]
        system: list[Message] = []
        if isinstance(instructions := body.get("instructions"), str) and instructions:
            system = [{"role": "system", "content": instructions}]
        messages = _system_first([*system, *to_messages(items)])
        if not messages:
            raise line.error("no messages in its `input`")
        yield Request(
            messages=messages,
            answer=next(iter(to_messages(output)), None),
            tools=parts.to_tools(tools_of(line, body)),
            session=session_of(line.value, body),
            prompt_tokens=prompt_tokens_of(answer, line.value),
            body=body,
            at=time_of(line.value, answer),
            mark=mark_of(line.value),
            is_refused=was_refused(line.value, line.value.get("response"), answer),
        )


def _found(value: Dict) -> Found | None:
    """The body in a line. One with a text and a model alone may be another API's, unless items were answered."""
    answer = joined(find_answer(value))
    is_answered = isinstance(answer, dict) and bool(as_objects(answer.get("output")))

    def body(one: Dict) -> Dict | None:
        items = as_objects(asked := one.get("input"))
        is_body = is_answered or any(key in one for key in _OWN_KEYS) if isinstance(asked, str) else bool(items)
        return one if is_body and all("role" in item or "type" in item for item in items) else None

    return find_body(value, body)


def to_messages(items: Iterable[Dict]) -> list[Message]:
    """Items as chat messages; what a model wrote in a row becomes one message, thoughts and calls included."""
    messages: list[Message] = []
    for item in items:
        message = to_message(item)
        if message is None:
            continue
        if message["role"] == "assistant" and messages and messages[-1]["role"] == "assistant":
            messages[-1] = _joined(messages[-1], message)
        else:
            messages.append(message)
    return messages


def to_message(item: Dict) -> Message | None:
    """One item as a chat message; None for what no prompt shows (a thought without text, a search on the server)."""
    kind = item.get("type", "message")
    if kind in _CALLS:
        if kind == "custom_tool_call":
            item = {**item, "arguments": parts.as_text({"input": item.get("input") or ""})}
        return {"role": "assistant", "content": "", "tool_calls": [parts.call_of({"name": kind, **item})]}
    if kind in _OUTPUTS:
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(parts.output_of(item))}
    if kind == "reasoning":
        thoughts = as_objects(item.get("summary")) or as_objects(item.get("content"))
        thought = "\n".join(text for part in thoughts if isinstance(text := part.get("text"), str) and text)
        return {"role": "assistant", "content": "", "reasoning_content": thought} if thought else None
    if kind != "message" or not isinstance(item.get("role"), str):
        return None
    role, content = item["role"], item.get("content")
    if isinstance(content, list):
        shown = [_part(part) for part in as_objects(content)]
        content = shown[0]["text"] if len(shown) == 1 and "text" in shown[0] else [*shown]
    if role == "developer":
        # As SGLang names them, because templates know no such role.
        role, content = "system", f"Developer instructions:\n{content if isinstance(content, str) else _text(content)}"
    return {"role": role, "content": content}


def _joined(first: Message, second: Message) -> Message:
    texts = [text for one in (first, second) if (text := _text(one.get("content")))]
    thoughts = [str(one["reasoning_content"]) for one in (first, second) if one.get("reasoning_content")]
    calls = [*as_objects(first.get("tool_calls")), *as_objects(second.get("tool_calls"))]
    joined: Message = {"role": "assistant", "content": "\n\n".join(texts)}
    if thoughts:
        joined["reasoning_content"] = "\n".join(thoughts)
    if calls:
        joined["tool_calls"] = [*calls]
    return joined


def _system_first(messages: list[Message]) -> list[Message]:
    """One system message in front, as most templates want it."""
    texts = [_text(message.get("content")) for message in messages if message.get("role") == "system"]
    rest = [message for message in messages if message.get("role") != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest] if texts else rest


def _part(part: Dict) -> Dict:
    if isinstance(text := part.get("text"), str):
        return {"type": "text", "text": text}
    if part.get("type") == "input_image":
        url = part.get("image_url")
        return {"type": "image_url", "image_url": url if isinstance(url, dict) else {"url": url}}
    return part


def _text(content: JsonValue) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in as_objects(content))
    return content if isinstance(content, str) else ""
