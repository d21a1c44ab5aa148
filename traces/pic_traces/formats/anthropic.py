"""Anthropic's Messages API as SGLang serves it: the same chat messages as its own `/v1/messages` makes of a body."""

from __future__ import annotations

from pic_traces.formats import parts
from pic_traces.formats.bodies import as_objects
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
    return [*system, *(one for message in rest for one in parts.to_chat(message))]


def to_answer(message: Message) -> Message:
    """An assistant's message; one of OpenAI's comes back as it is."""
    blocks = as_objects(message.get("content"))
    if not any(block.get("type") in _BLOCKS for block in blocks) and message.get("type") != "message":
        return message
    return next(parts.to_chat(message))


def _texts(content: JsonValue) -> list[str]:
    if isinstance(content, str):
        return [content] if content.strip() else []
    texts = (block.get("text") for block in as_objects(content) if block.get("type", "text") == "text")
    return [text for text in texts if isinstance(text, str) and text]
