"""OpenTelemetry spans of calls of models, with the semantic conventions for generative AI: as OTLP, or one a line.

Read are `gen_ai.input.messages` and their kin, and the numbered attributes of OpenLLMetry (`gen_ai.prompt.0.role`) and
OpenInference (`llm.input_messages.0.message.role`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec

from pic_traces.formats.bodies import as_object, as_objects
from pic_traces.formats.chat import request_of
from pic_traces.formats.reader import Dict, Reader, Request
from pic_traces.lines import Line
from pic_traces.session import JsonValue, Message, as_type

_NUMBERED = re.compile(
    r"(?:gen_ai\.(?P<kind>prompt|completion)|llm\.(?P<other>input|output)_messages)\.(?P<number>\d+)\.(?:message\.)?(?P<key>.+)"
)
_CALL = re.compile(r"tool_calls\.(\d+)\.(?:tool_call\.)?(?:function\.)?(name|arguments|id)")
_TOKENS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
_SESSIONS = (
    "gen_ai.conversation.id",
    "session.id",
    "langfuse.session.id",
    "traceloop.association.properties.session_id",
)


class OTel(Reader):
    """Implements `Reader`. Spans of no model, of tools and agents, are passed over in silence."""

    name = "OpenTelemetry spans"

    def __init__(self) -> None:
        self._num_spans = self._num_calls = 0

    @staticmethod
    def recognizes(line: Line) -> bool:
        value = line.value
        if "resourceSpans" in value or "resource_spans" in value:
            return True
        return "attributes" in value and bool({"traceId", "trace_id", "context", "spanId", "span_id"} & value.keys())

    def take(self, line: Line) -> Iterator[Request]:
        found = 0
        for span in _spans(line.value):
            attributes = _attributes(span.get("attributes"))
            for event in as_objects(span.get("events")):
                attributes = {**_attributes(event.get("attributes")), **attributes}
            prompt, answer = _messages(attributes)
            if not prompt:
                continue
            found += 1
            tools = [_tool(tool) for tool in as_objects(_decoded(attributes.get("gen_ai.tool.definitions")))]
            body: Dict = {"messages": [*prompt], "tools": [*tools] or None}
            request = request_of(line._replace(value={}), body, answer[0] if answer else None)
            request.prompt_tokens = next((n for key in _TOKENS if (n := as_type(attributes.get(key), int))), None)
            context = as_object(span.get("context"))
            trace = span.get("traceId") or span.get("trace_id") or context.get("trace_id")
            name = next((attributes[key] for key in _SESSIONS if attributes.get(key)), trace)
            request.session = None if name is None else str(name)
            yield request
        if not found:
            raise line.error(
                "OpenTelemetry spans without messages; let the instrumentation record them "
                "(OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true, TRACELOOP_TRACE_CONTENT=true)"
            )


def _spans(value: Dict) -> Iterator[Dict]:
    resources = as_objects(value.get("resourceSpans") or value.get("resource_spans"))
    if not resources:
        yield value
    for resource in resources:
        for scope in as_objects(resource.get("scopeSpans") or resource.get("scope_spans")):
            yield from as_objects(scope.get("spans"))


def _attributes(attributes: JsonValue) -> Dict:
    """Attributes by name, whether they were written as an object or as OTLP's list."""
    if isinstance(attributes, dict):
        return attributes
    return {str(one.get("key")): _plain(as_object(one.get("value"))) for one in as_objects(attributes)}


def _plain(value: Dict) -> JsonValue:
    """A value of OTLP's: `{"stringValue": ...}`, lists and maps of such values."""
    for kind, inner in value.items():
        if kind == "arrayValue":
            return [_plain(one) for one in as_objects(as_object(inner).get("values"))]
        if kind == "kvlistValue":
            return _attributes(as_object(inner).get("values"))
        if kind == "intValue":
            return int(inner) if isinstance(inner, str | int) and str(inner).lstrip("-").isdigit() else None
        return inner
    return None


def _messages(attributes: Dict) -> tuple[list[Message], list[Message]]:
    """The prompt's messages and the answer's."""
    prompt = _structured(attributes.get("gen_ai.input.messages") or attributes.get("gen_ai.prompt"))
    answer = _structured(attributes.get("gen_ai.output.messages") or attributes.get("gen_ai.completion"))
    if system := as_objects(_decoded(attributes.get("gen_ai.system_instructions"))):
        text = "\n".join(str(part.get("content", part.get("text", ""))) for part in system)
        prompt = [{"role": "system", "content": text}, *prompt] if prompt else prompt
    return (prompt, answer) if prompt else _numbered(attributes)


def _structured(value: JsonValue) -> list[Message]:
    return [one for message in as_objects(_decoded(value)) if "role" in message for one in _of_parts(message)]


def _of_parts(message: Dict) -> Iterator[Message]:
    """A message whose `parts` are texts, thoughts, calls and their results; one with `content` stays as it is."""
    if not isinstance(message.get("parts"), list):
        yield message
        return
    rest: Message = {"role": message["role"], "content": ""}
    parts: list[JsonValue] = []
    calls: list[JsonValue] = []
    for part in as_objects(message["parts"]):
        kind, content = part.get("type"), part.get("content")
        if kind == "tool_call_response":
            result = part.get("response", part.get("result", content))
            yield {"role": "tool", "tool_call_id": part.get("id"), "content": _text(result)}
        elif kind == "tool_call":
            function = {"name": part.get("name"), "arguments": _text(part.get("arguments"))}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind in ("reasoning", "thinking"):
            rest["reasoning_content"] = f"{rest.get('reasoning_content', '')}{content or ''}"
        elif kind == "text" or isinstance(content, str | None):
            parts.append({"type": "text", "text": str(content or "")})
        else:
            parts.append(part)
    if len(parts) == 1 and as_object(parts[0]).get("type") == "text":
        rest["content"] = as_object(parts[0])["text"]
    elif parts:
        rest["content"] = parts
    if calls:
        rest["tool_calls"] = calls
    if parts or calls or "reasoning_content" in rest:
        yield rest


def _numbered(attributes: Dict) -> tuple[list[Message], list[Message]]:
    """Messages whose fields are attributes of their own."""
    fields: tuple[dict[int, Dict], dict[int, Dict]] = ({}, {})
    for name, value in attributes.items():
        if found := _NUMBERED.fullmatch(name):
            is_answer = found["kind"] == "completion" or found["other"] == "output"
            fields[is_answer].setdefault(int(found["number"]), {})[found["key"]] = value
    prompt, answer = ([_of_fields(one) for _, one in sorted(side.items()) if one.get("role")] for side in fields)
    return prompt, answer


def _of_fields(fields: Dict) -> Message:
    message: Message = {"role": str(fields["role"]), "content": fields.get("content") or ""}
    if isinstance(fields.get("tool_call_id"), str):
        message["tool_call_id"] = fields["tool_call_id"]
    calls: dict[int, Dict] = {}
    for key, value in fields.items():
        if found := _CALL.fullmatch(key):
            calls.setdefault(int(found[1]), {})[found[2]] = value
    if calls:
        message["tool_calls"] = [
            {"id": call.pop("id", None), "type": "function", "function": {"arguments": "{}", **call}}
            for _, call in sorted(calls.items())
        ]
    return message


def _tool(tool: Dict) -> Dict:
    if "function" in tool:
        return tool
    function: Dict = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
    return {"type": "function", "function": function}


def _decoded(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        try:
            return msgspec.json.decode(value)
        except (ValueError, RecursionError):
            return None
    return value


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
