"""Anthropic's Messages API as SGLang serves it: the same chat messages as its own `/v1/messages` makes of a body."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pic_traces.formats.bodies import as_object, as_objects
from pic_traces.formats.reader import Dict
from pic_traces.session import JsonValue, Message

_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking", "search_result")


def is_anthropic(body: Dict) -> bool:
    """Whether a body is Anthropic's: it has a system prompt beside the messages, its blocks, or its tools."""
    if "system" in body or "anthropic_version" in body:
        return True
    blocks = (block for message in as_objects(body.get("messages")) for block in as_objects(message.get("content")))
    return any("input_schema" in tool for tool in as_objects(body.get("tools"))) or any(
        block.get("type") in _BLOCKS or (block.get("type") == "image" and "source" in block) for block in blocks
    )


def to_messages(body: Dict) -> list[Message]:
    """The messages of a request body, the system prompt first; system messages further down are joined to it."""
    inner = [message for message in as_objects(body.get("messages")) if message.get("role") == "system"]
    texts = [*_texts(body.get("system")), *(text for message in inner for text in _texts(message.get("content")))]
    system: list[Message] = [{"role": "system", "content": "\n".join(texts)}] if texts else []
    rest = (message for message in as_objects(body.get("messages")) if message.get("role") != "system")
    return [*system, *(one for message in rest for one in to_chat(message))]


def to_tools(tools: JsonValue) -> list[JsonValue] | None:
    """Tool schemas in OpenAI's form; tools that Anthropic's own servers run are left out."""
    found: list[JsonValue] = []
    for tool in as_objects(tools):
        if "function" in tool:
            found.append(tool)
        elif "input_schema" in tool:
            function: Dict = {"name": tool.get("name"), "description": tool.get("description") or ""}
            function |= {"parameters": tool["input_schema"], "strict": bool(tool.get("strict"))}
            found.append({"type": "function", "function": function})
    return found or None


def to_answer(message: Message) -> Message:
    """An assistant's message; one of OpenAI's comes back as it is."""
    blocks = as_objects(message.get("content"))
    if not any(block.get("type") in _BLOCKS for block in blocks) and message.get("type") != "message":
        return message
    return next(to_chat(message))


def to_chat(message: Message) -> Iterator[Message]:
    """One message as OpenAI's: a message for each tool result, in order, with the text around it in its own."""
    content = message.get("content")
    if not isinstance(content, list):
        yield {"role": message.get("role"), "content": content}
        return
    is_user = message.get("role") == "user"
    parts: list[JsonValue] = []
    calls: list[JsonValue] = []
    thoughts: list[str] = []
    for block in as_objects(content):
        kind = block.get("type")
        if kind == "tool_result" and is_user:
            if parts:
                yield {"role": "user", "content": _content(parts)}
            parts = []
            tool_call_id = block.get("tool_use_id") or block.get("id") or ""
            yield {"role": "tool", "tool_call_id": tool_call_id, "content": _result(block.get("content"))}
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            function: Dict = {"name": block.get("name") or "", "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking" and isinstance(thought := block.get("thinking"), str):
            thoughts.append(thought)
        elif kind != "redacted_thinking":
            parts += _part(block)
    if is_user and not parts:
        return
    rest: Message = {"role": message.get("role"), "content": _content(parts)}
    if thought := "\n".join(filter(None, thoughts)):
        rest["reasoning_content"] = thought
    if calls:
        rest["tool_calls"] = calls
    yield rest


def _part(block: Dict) -> list[JsonValue]:
    """A block of text or an image as a part of OpenAI's content; nothing for what the template would not see."""
    kind, source = block.get("type"), as_object(block.get("source"))
    if isinstance(text := block.get("text"), str):
        return [{"type": "text", "text": text}]
    if kind == "image" and source:
        data = f"data:{source.get('media_type', 'image/png')};base64,{source.get('data')}"
        return [{"type": "image_url", "image_url": {"url": source.get("url") or data}}]
    if kind == "search_result":
        where = source.get("url") or source.get("text") or block.get("source")
        texts = (("Title", block.get("title")), ("Source", where), ("Content", "\n".join(_texts(block.get("content")))))
        return [{"type": "text", "text": "\n".join(f"{name}: {text}" for name, text in texts if text)}]
    if kind == "tool_result":
        return [{"type": "text", "text": f"Tool result: {_result(block.get('content'))}"}]
    return []


def _result(content: JsonValue) -> JsonValue:
    if isinstance(content, list):
        return _content([part for block in as_objects(content) for part in _part(block)])
    return str(content) if content else ""


def _content(parts: list[JsonValue]) -> JsonValue:
    """One text, or several parts."""
    if not parts:
        return ""
    only = as_object(parts[0])
    return only["text"] if len(parts) == 1 and only.get("type") == "text" else parts


def _texts(content: JsonValue) -> list[str]:
    if isinstance(content, str):
        return [content] if content.strip() else []
    texts = (block.get("text") for block in as_objects(content) if block.get("type") == "text")
    return [text for text in texts if isinstance(text, str) and text]
