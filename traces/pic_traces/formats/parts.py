"""Messages as other APIs, frameworks and tracers spell them, as OpenAI's: roles, parts, calls of tools, results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from pic_traces.formats.bodies import as_list, as_object, as_objects, first_of
from pic_traces.formats.reader import Dict
from pic_traces.session import JsonValue, Message

_OWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ROLES = {
    "model": "assistant", "ai": "assistant", "gemini": "assistant", "agent": "assistant", "aichunk": "assistant",
    "human": "user", "toolResult": "tool", "tool_result": "tool",
}  # fmt: skip
"""Other names of roles; LangChain has them as the message's `type`, or in the name of its class."""
_KEPT = ("name", "reasoning_content", "tool_call_id")

# A part's kind is its `type`, or where it has none the one key of these that it has: Bedrock Converse, Gemini.
_TEXTS = ("text", "input_text", "output_text")
_THOUGHTS = ("thinking", "reasoning", "reasoningContent")
_CALLS = (
    "tool_use", "tool_call", "tool-call", "toolCall", "toolUse", "functionCall", "toolRequest", "tool-invocation",
)  # fmt: skip
_RESULTS = (
    "tool_result", "tool-result", "toolResult", "tool_call_response", "functionResponse", "toolResponse", "json",
)  # fmt: skip
_UNSEEN = (
    "redacted_thinking", "redacted-reasoning", "step-start", "step-finish", "snapshot", "patch", "cachePoint",
    "source-url",
)  # fmt: skip
_ANTHROPICS = ("tool_use", "tool_result", "thinking", "redacted_thinking", "search_result", "image")
_INNER = ("message_content", "toolCall", "toolResult", "toolInvocation", "tool_call", "function", "value", "state")
"""Where parts and calls have their fields, beside the key of their kind."""
_IDS = ("tool_use_id", "toolUseId", "toolCallId", "tool_call_id", "source_call_id", "call_id", "callID", "id")
_NAMES = ("name", "toolName", "function_name", "tool")
_INPUTS = ("arguments", "input", "args", "action")
_OUTPUTS = ("content", "output", "response", "result", "value", "errorText", "json")
_SCHEMAS = ("parameters", "input_schema", "inputSchema", "parametersJsonSchema", "json", "jsonSchema")


def to_messages(values: Iterable[Dict]) -> list[Message]:
    """Recorded messages as OpenAI's; those that are stay as they are, objects that are no messages are left out."""
    return [one for value in values for one in (to_chat(value) if is_foreign(value) else [value])]


def is_message(value: JsonValue) -> bool:
    """Whether a value is a message in any spelling."""
    return isinstance(value, dict) and _role(_unwrapped(value)) is not None


def is_foreign(value: Dict) -> bool:
    """Whether a message is spelled otherwise than OpenAI's API and Anthropic's do."""
    message = _unwrapped(value)
    return (
        message is not value
        or bool({"parts", "contents"} & message.keys())
        or message.get("role") not in _OWN_ROLES
        or any("function" not in call for call in as_objects(message.get("tool_calls")))
        or any(_is_foreign_part(part) for part in as_objects(_parts(message)))
    )


def to_chat(value: Dict) -> Iterator[Message]:
    """A message of any other spelling, Anthropic's too, as OpenAI's.

    It becomes several where it has results of tools: each is a message, in its place between the texts and the calls.
    """
    message = _unwrapped(value)
    role, calls = _role(message), as_objects(message.get("tool_calls"))
    content = message.get("content") or ""
    blocks = [block for part in _parts(message) for block in _blocks(part)]
    if role is None or (role == "user" and _parts(message) and not blocks):
        return
    if calls:
        # LangChain has them twice, and its content as the provider spelled it.
        texts: list[Dict] = [{"type": "text", "text": content}] if content and not blocks else []
        blocks = [block for block in blocks if "call" not in block] + texts
        blocks += [{"call": call_of(call)} for call in calls]
    rest: Message = {"role": role, "content": content if isinstance(content, str) else ""}
    rest |= {key: message[key] for key in _KEPT if key in message}
    if role == "tool" and (name := first_of(message, *_IDS)):
        rest["tool_call_id"] = name
    said = list[Dict]()
    results = list[Message]()
    for block in [*blocks, None]:
        if block is not None and "result" in block:
            results.append(block["result"])  # type: ignore[arg-type]
            continue
        if block is None or (results and "call" not in block):
            if said or not results:
                yield _said(rest, said)
            yield from results
            said, results = [], []
        said += [block] if block else []


def call_of(value: Dict) -> JsonValue:
    """A call of a tool as OpenAI's."""
    fields, arguments = _fields(value), first_of(_fields(value), *_INPUTS) or {}
    # As SGLang's converter of Anthropic's writes them.
    text = json.dumps(arguments) if value.get("type") == "tool_use" else as_text(arguments)
    function: Dict = {"name": first_of(fields, *_NAMES) or "", "arguments": text}
    return {"id": first_of(fields, *_IDS), "type": "function", "function": function}


def to_tools(tools: JsonValue) -> list[JsonValue] | None:
    """Tool schemas as OpenAI's: bare, in the wrappers of other APIs and tracers, or as JSON in strings.

    Tools that a provider's own servers run have no schema, and are left out.
    """
    found: list[JsonValue] = []
    for tool in map(as_object, as_list(tools)):
        inner = first_of(tool, "functionDeclarations", "function_declarations", "tool", "json_schema", "toolSpec")
        if inner is not None:
            found += to_tools(as_list(inner) or [inner]) or []
        elif "function" in tool:
            found.append(tool)
        elif "name" in tool and tool.get("type", "function") in ("function", "custom", "tool"):
            schema = first_of(tool, *_SCHEMAS)
            while isinstance(schema, str) or (isinstance(schema, dict) and first_of(schema, "json", "jsonSchema")):
                schema = as_object(schema) if isinstance(schema, str) else first_of(schema, "json", "jsonSchema")
            if tool.get("type") == "custom" and schema is None:
                schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
            function: Dict = {key: tool[key] for key in ("name", "description") if key in tool}
            function |= {"parameters": schema or {}} | ({"strict": tool["strict"]} if "strict" in tool else {})
            if "input_schema" in tool:
                function |= {"description": tool.get("description") or "", "strict": bool(tool.get("strict"))}
            found.append({"type": "function", "function": function})
    return found or None


def as_text(value: JsonValue) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _said(message: Message, blocks: list[Dict]) -> Message:
    """A message of texts, thoughts and calls."""
    said = {**message, "content": _content([block for block in blocks if not {"thought", "call"} & block.keys()])}
    said["content"] = said["content"] or ("" if blocks else message["content"])
    if thought := "\n".join(str(block["thought"]) for block in blocks if block.get("thought")):
        said["reasoning_content"] = thought
    if calls := [block["call"] for block in blocks if "call" in block]:
        said["tool_calls"] = calls
    return said


def _content(blocks: list[Dict]) -> JsonValue:
    """One text, or several parts."""
    is_text = len(blocks) == 1 and blocks[0].get("type") == "text"
    return blocks[0].get("text") if is_text else [*blocks] or ""


def _blocks(part: JsonValue) -> list[Dict]:
    """A part as `{"thought"}`, `{"call"}`, `{"result"}` or a part of OpenAI's; a call with its result is two."""
    if not isinstance(part, dict):
        return [{"type": "text", "text": part}] if isinstance(part, str) else []
    kind, fields = _kind(part), _fields(part)
    text = first_of(fields, "text", "content", "thinking", "reasoning", "reasoningText")
    text = as_object(text).get("text", text)
    is_tool = kind in ("tool", "dynamic-tool") or (kind.startswith("tool-") and kind not in _CALLS + _RESULTS)
    if kind in (*_UNSEEN, *_THOUGHTS) or part.get("thought") is True:
        return [] if kind in _UNSEEN else [{"thought": text}]
    if kind in _CALLS or is_tool:
        named = {"toolName": kind.removeprefix("tool-")} if kind.startswith("tool-") and is_tool else {}
        is_done = (is_tool or kind == "tool-invocation") and first_of(fields, *_OUTPUTS) is not None
        return [{"call": call_of({**named, **part})}, *([_result(fields)] if is_done else [])]
    if kind in _RESULTS:
        return [_result(fields)]
    if kind in ("image", "search_result") and "source" in part:
        return [_anthropics(part)]
    return [{"type": "text", "text": text}] if isinstance(text, str) else [part]


def _anthropics(block: Dict) -> Dict:
    """An image or a search result as SGLang's converter makes parts of them."""
    source = as_object(block["source"])
    if block["type"] == "image":
        data = f"data:{source.get('media_type', 'image/png')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": source.get("url") or data}}
    where, found = source.get("url") or source.get("text") or block["source"], as_objects(block.get("content"))
    texts = [("Title", block.get("title")), ("Source", where)]
    texts.append(("Content", "\n".join(str(one["text"]) for one in found if one.get("text"))))
    return {"type": "text", "text": "\n".join(f"{name}: {text}" for name, text in texts if text)}


def _result(fields: Dict) -> Dict:
    return {"result": {"role": "tool", "tool_call_id": first_of(fields, *_IDS) or "", "content": output_of(fields)}}


def output_of(fields: Dict) -> JsonValue:
    """What a tool gave, as text or parts, without the objects that only wrap it."""
    found = first_of(fields, *_OUTPUTS)
    if isinstance(found, dict) and (found.get("type") in ("text", "json", "content") or len(found) == 1):
        return output_of({"content": first_of(found, *_OUTPUTS, "text", *found)})
    if isinstance(found, list) and (inner := as_objects(found)):
        if [_kind(part) for part in inner] == ["json"]:
            return output_of(inner[0])
        if {_kind(part) for part in inner} <= {*_TEXTS, "image"}:
            return _content([block for part in inner for block in _blocks(part)])
    return as_text(found or "")


def _fields(value: Dict) -> Dict:
    """The fields of a part or a call, without the objects around them."""
    fields = {**value, **as_object(value.get(_kind(value)))}
    for key in _INNER:
        fields |= as_object(fields.get(key))
    return fields


def _parts(message: Dict) -> list[JsonValue]:
    found = next((message[key] for key in ("parts", "contents", "content") if message.get(key)), None)
    inner = as_list(found)
    # A text may be a list as JSON; tracers write parts so.
    return inner if isinstance(found, list) or all(isinstance(part, dict) and "type" in part for part in inner) else []


def _kind(part: Dict) -> str:
    part = as_object(part.get("message_content")) or part
    return str(part.get("type") or next((key for key in part if key in _TEXTS + _THOUGHTS + _CALLS + _RESULTS), ""))


def _is_foreign_part(part: Dict) -> bool:
    kind = part.get("type")
    is_known = isinstance(kind, str) and kind not in _THOUGHTS + _CALLS + _RESULTS + _UNSEEN
    return kind not in _ANTHROPICS and (not is_known or (kind == "text" and "text" not in part))


def _role(message: Dict) -> str | None:
    """OpenAI's name of a message's role; None if it has none."""
    found = message.get("role", message.get("type"))
    role = _ROLES.get(found, found) if isinstance(found, str) else None
    return role if "role" in message or (role in _OWN_ROLES and "content" in message) else None


def _unwrapped(value: Dict) -> Dict:
    """A message out of the wrapper of a tracer or a framework."""
    inner = value
    if "role" not in value:
        if isinstance((info := as_object(value.get("info"))).get("role"), str):
            return {"role": info["role"], "parts": value.get("parts")}
        found = (as_object(value.get(key)) for key in ("message", "kwargs", "data"))
        inner = next((one for one in found if {"role", "content", "contents", "parts"} & one.keys()), value)
        if inner is not value and "role" not in inner:
            name = str((as_list(value.get("id")) or [""])[-1]).removesuffix("Message").lower()
            kinds = (inner.get("type"), value.get("type"), name)
            inner = {**inner, "type": next((kind for kind in kinds if kind in (*_ROLES, *_OWN_ROLES)), "")}
    more = as_objects(as_object(inner.get("additional_kwargs")).get("tool_calls"))
    return {**inner, "tool_calls": [*more]} if more and not inner.get("tool_calls") else inner
