"""Streamed answers that were recorded as they came: server-sent events of the three APIs, or lists of their data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from pic_traces.formats import parts
from pic_traces.formats.bodies import as_list, as_object, as_objects, first_of
from pic_traces.formats.reader import Dict
from pic_traces.session import JsonValue

_DATA = re.compile(r"^(?:data:[ ]?)?(\{.*)$", re.MULTILINE)
_STREAM = re.compile(r"\s*(?:event|data|id|:|\{)")


def joined(value: JsonValue) -> JsonValue:
    """The whole answer of a stream: a message, or a response; any other value as it is."""
    text = value if isinstance(value, str) and _STREAM.match(value) else ""
    return _whole([*map(as_object, _DATA.findall(text)), *as_objects(as_list(value))]) or value


def _whole(events: Iterable[Dict]) -> Dict | None:
    content: dict[int, Dict] = {}
    texts, thoughts, usage = list[str](), list[str](), Dict()
    calls: dict[int, Dict] = {}
    seen, error = False, Dict()
    for event in events:
        response = as_object(event.get("response"))
        if event.get("type") in ("response.completed", "response.incomplete", "response.failed") and response:
            return response
        error = as_object(event.get("error")) or error
        usage |= as_object(first_of(event, "usage", "usageMetadata"))
        usage |= as_object(as_object(event.get("message")).get("usage"))
        if event.get("type") == "content_block_start":
            content[len(content)] = dict(as_object(event.get("content_block")))
        elif event.get("type") == "content_block_delta" and content:
            _grow(content[len(content) - 1], as_object(event.get("delta")))
        for delta in _deltas(event):
            seen = seen or bool(delta)
            texts.append(str(delta.get("content") or ""))
            thoughts.append(str(delta.get("reasoning_content") or delta.get("reasoning") or ""))
            for call in as_objects(delta.get("tool_calls")):
                # Gemini's and Ollama's are whole, and have no number.
                is_begun = bool(calls) and not as_object(call.get("function")).get("name")
                index = call.get("index", len(calls) - is_begun)
                _grow_call(calls.setdefault(index if isinstance(index, int) else 0, {}), call)
    if content:
        blocks: JsonValue = [_block(block) for block in content.values()]
        return {"type": "message", "role": "assistant", "content": blocks, "usage": usage}
    if not seen:
        return {"error": error} if error else None
    message: Dict = {"role": "assistant", "content": "".join(texts)}
    if thought := "".join(thoughts):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [call for _, call in sorted(calls.items())]
    return {"choices": [{"message": message}], "usage": usage}


def _deltas(event: Dict) -> Iterator[Dict]:
    """What an event adds to the answer; of several answers to the first one."""
    for choice in [*as_objects(event.get("choices")), *as_objects(event.get("candidates"))]:
        if not choice.get("index"):
            yield as_object(choice.get("delta"))
            for part in as_list(as_object(choice.get("content")).get("parts")):
                yield from parts.to_chat({"role": "model", "parts": [part]})
    if "done" in event:
        yield as_object(event.get("message"))


def _grow(block: Dict, delta: Dict) -> None:
    for name in ("text", "thinking"):
        if isinstance(delta.get(name), str):
            block[name] = f"{block.get(name) or ''}{delta[name]}"
    if isinstance(delta.get("partial_json"), str):
        block["json"] = f"{block.get('json', '')}{delta['partial_json']}"


def _block(block: Dict) -> Dict:
    return {**block, "input": as_object(block["json"])} if "json" in block else block


def _grow_call(call: Dict, delta: Dict) -> None:
    function, more = as_object(call.get("function")), as_object(delta.get("function"))
    call["id"] = call.get("id") or delta.get("id")
    call["type"] = "function"
    call["function"] = {
        "name": function.get("name") or more.get("name"),
        "arguments": f"{function.get('arguments', '')}{parts.as_text(more.get('arguments') or '')}",
    }
