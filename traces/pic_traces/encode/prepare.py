"""Recorded messages as a chat template gets them: with arguments parsed, without images, which a digest stands for."""

from __future__ import annotations

import hashlib
from enum import Enum

import msgspec

from pic_traces.flatten import flatten_tools
from pic_traces.session import JsonValue, Message, as_type

_TEXT_PARTS = ("text", "input_text")


class ContentForm(Enum):
    """How a template takes content that was recorded as a list of parts."""

    TEXT = "text"
    PARTS = "parts"


class Preparation:
    """Prepares messages for one encoder, and counts what it had to replace.

    Content becomes text where the template takes no parts: text parts joined by a space, as SGLang does. A part that is
    no text (an image, a sound) becomes the text `[TYPE DIGEST]`, equal for equal images only. A thought
    (`reasoning_content`) stays beside the content: the template decides which it shows.
    """

    def __init__(self, form: ContentForm) -> None:
        self._form = form
        self._num_replaced = 0

    def notes(self) -> tuple[str, ...]:
        """What a report should say about the messages so far; empty if there is nothing to say."""
        if not self._num_replaced:
            return ()
        return (f"{self._num_replaced:,} images or other parts that are no text count as one short placeholder each",)

    def flatten(self, messages: list[Message], tools: list[JsonValue] | None) -> list[Message]:
        """Messages for a template that shows no tools: everything about tools is plain text."""
        without_media = [self._replace_media(message) for message in messages]
        return [self._shape_content(message) for message in flatten_tools(without_media, tools)]

    def keep_tools(self, messages: list[Message]) -> list[Message]:
        """Messages for a template that shows tools: arguments of tool calls parsed, nothing None."""
        result: list[Message] = []
        for message in messages:
            prepared = self._shape_content(self._replace_media(message))
            if isinstance(calls := message.get("tool_calls"), list):
                prepared = {**prepared, "tool_calls": [_parse_arguments(call) for call in calls]}
            result.append({key: value for key, value in prepared.items() if value is not None})
        return result

    def _shape_content(self, message: Message) -> Message:
        content = message.get("content")
        if isinstance(content, str):
            return message
        # Results of tools are text for every template.
        if isinstance(content, list) and self._form is ContentForm.PARTS and message.get("role") != "tool":
            return message
        return {**message, "content": content_text(content, joint=" ")}

    def _replace_media(self, message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": [self._text_part(part) for part in content]}

    def _text_part(self, part: JsonValue) -> JsonValue:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        self._num_replaced += 1
        kind = part.get("type") if isinstance(part, dict) else None
        return {"type": "text", "text": f"[{kind if isinstance(kind, str) else 'part'} {_digest(part)}]"}


def _digest(part: JsonValue) -> str:
    """A name for what an image or another part shows: the same without marks for a provider's cache."""
    seen = part
    if isinstance(part, dict):
        image = as_type(part.get("image_url"), dict[str, JsonValue]) or {}
        seen = image.get("url") or {key: value for key, value in part.items() if key != "cache_control"}
    return hashlib.blake2b(msgspec.json.encode(seen), digest_size=4).hexdigest()


def content_text(content: JsonValue, joint: str = "") -> str:
    """A message's content as one string; empty for None."""
    if isinstance(content, list):
        return joint.join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def recorded_roles(recorded: list[Message], prepared: list[Message]) -> list[str]:
    """The role of each prepared message as it was recorded: a flattened tool result is still a tool's.

    A message put in front of the recorded ones (tool schemas as text) keeps its own role.
    """
    added = [str(message["role"]) for message in prepared[: len(prepared) - len(recorded)]]
    return [*added, *(str(message["role"]) for message in recorded)]


def _parse_arguments(call: JsonValue) -> JsonValue:
    """A tool call with its arguments as an object, which templates expect, if they are the text of a JSON object."""
    called = as_type(call, dict[str, JsonValue]) or {}
    function = as_type(called.get("function"), dict[str, JsonValue]) or {}
    try:
        arguments = msgspec.json.decode(as_type(function.get("arguments"), str) or "")
    except msgspec.DecodeError:
        return call
    return {**called, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
