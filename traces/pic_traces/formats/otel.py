"""OpenTelemetry spans and log records of calls of models, as OTLP or one a line.

Read are the semantic conventions for generative AI (`gen_ai.input.messages`, and the older events of each message), and
the attributes of OpenLLMetry, OpenInference, the Vercel AI SDK and MLflow. Attributes with numbers in their names
(`llm.input_messages.0.message.role`) are put together to lists first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from pic_traces.formats import parts
from pic_traces.formats.bodies import as_list, as_object, as_objects, prompt_tokens_of, was_refused
from pic_traces.formats.chat import chat_body, request_of
from pic_traces.formats.reader import Dict, Reader, Request
from pic_traces.formats.times import time_of
from pic_traces.lines import Line
from pic_traces.session import JsonValue, as_type

# Where the conventions put things; the first that is there counts.
_PROMPTS = (
    "gen_ai.input.messages", "ai.prompt.messages", "gen_ai.prompt", "llm.input_messages", "mlflow.spanInputs",
)  # fmt: skip
_ANSWERS = (
    "gen_ai.output.messages",
    "gen_ai.completion",
    "llm.output_messages",
    "mlflow.spanOutputs",
    "ai.response.text",
)
_TOOLS = ("gen_ai.tool.definitions", "llm.request.functions", "llm.tools", "ai.prompt.tools", "mlflow.chat.tools")
_TOKENS = (
    "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt", "ai.usage.promptTokens",
    "ai.usage.inputTokens",
)  # fmt: skip
_SESSIONS = (
    "gen_ai.conversation.id", "session.id", "langfuse.session.id", "traceloop.association.properties.session_id",
    "mlflow.trace.session", "ai.telemetry.metadata.sessionId",
)  # fmt: skip
_KINDS = ("openinference.span.kind", "mlflow.spanType", "traceloop.span.kind")
_MODELS = ("LLM", "CHAT_MODEL")
_ERROR = 2
_NUMBER = re.compile(r"\.(\d+)(?:\.|$)")
_OUTPUT = re.compile(r"output|completion|response", re.IGNORECASE)
_EVENT = re.compile(r"gen_ai\.(system|user|assistant|tool|choice)(?:\.message)?")


class OTel(Reader):
    """Implements `Reader`. Spans of no model, of tools and agents, are passed over in silence."""

    name = "OpenTelemetry spans and log records"

    @staticmethod
    def recognizes(line: Line) -> bool:
        value = line.value
        if any(key in value for pair in _NESTS for key in pair[0]):
            return True
        return "attributes" in value and bool({"traceId", "trace_id", "context", "spanId", "span_id"} & value.keys())

    def take(self, line: Line) -> Iterator[Request]:
        found = 0
        for span in _spans(line.value):
            attributes = _listed(_attributes(span.get("attributes")))
            for event in as_objects(span.get("events")):
                attributes = {**_listed(_attributes(event.get("attributes"))), **attributes}
            body, answer = _call(attributes, span)
            if not body:
                continue
            found += 1
            one = line._replace(value={})
            request = request_of(one, body, answer)
            request.prompt_tokens = prompt_tokens_of({"input": _first(attributes, _TOKENS)})
            context = as_object(span.get("context"))
            trace = span.get("traceId") or span.get("trace_id") or context.get("trace_id")
            name = _first(attributes, _SESSIONS) or trace
            request.session = None if name is None else str(name)
            request.at = time_of(span)
            request.body = {name: value for name, value in attributes.items() if not _OUTPUT.search(name)} | body
            request.mark = as_type(span.get("spanId") or span.get("span_id") or context.get("span_id"), str)
            request.parent = as_type(span.get("parentSpanId") or span.get("parent_id"), str)
            request.is_refused = was_refused(span) or as_object(span.get("status")).get("code") == _ERROR
            yield request
        if not found:
            raise line.error(
                "OpenTelemetry spans without messages that are known (`gen_ai.input.messages`, `gen_ai.user.message` "
                "events, `llm.input_messages.*`, `ai.prompt.messages`); let the instrumentation record them "
                "(OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true, TRACELOOP_TRACE_CONTENT=true)"
            )


_NESTS = (
    (("resourceSpans", "resource_spans"), ("scopeSpans", "scope_spans"), ("spans",)),
    (("resourceLogs", "resource_logs"), ("scopeLogs", "scope_logs"), ("logRecords", "log_records")),
)


def _spans(value: Dict) -> Iterator[Dict]:
    """The spans of a line; log records of one span are put together to one that has them as events."""
    for names in _NESTS:
        level = [value]
        for keys in names:
            level = [inner for one in level for key in keys for inner in as_objects(one.get(key))]
        if names[-1] == ("spans",):
            yield from level
            continue
        spans: dict[str, Dict] = {}
        for record in level:
            said = {**_attributes(record.get("attributes")), **as_object(_plain(as_object(record.get("body"))))}
            event = {"name": record.get("eventName") or record.get("name"), "attributes": said}
            span = spans.setdefault(f"{record.get('spanId') or len(spans)}", {**record, "attributes": {}, "events": []})
            as_list(span["events"]).append(event)
        yield from spans.values()
    if "attributes" in value:
        yield value


def _call(attributes: Dict, span: Dict) -> tuple[Dict, JsonValue]:
    """A call's body and its answer; no body if a span has none."""
    events = [
        (found[1], event)
        for event in as_objects(span.get("events"))
        if (found := _EVENT.fullmatch(str(event.get("name"))))
    ]
    said: list[Dict] = []
    answer: JsonValue = None
    for kind, event in events:
        message = {"role": kind, **_attributes(event.get("attributes"))}
        calls = as_list(message.get("tool_calls"))
        inner = as_object(message.get("message"))
        message |= {"tool_calls": calls} if calls else {}
        message |= {"tool_call_id": message["id"]} if kind == "tool" and "id" in message else {}
        if kind == "choice":
            answer = {**message, **inner, "role": "assistant"}
        elif "content" in message or calls:
            said.append(message)
    if said:
        return {"messages": [*said], "tools": _decoded(_first(attributes, _TOOLS))}, answer
    if (kind := _first(attributes, _KINDS)) and str(kind).strip('"') not in _MODELS:
        return {}, None
    for key in _PROMPTS:
        sent = _decoded(attributes.get(key))
        body = chat_body(sent if isinstance(sent, dict) else {"messages": sent}) if sent else None
        if body is None or not all(map(parts.is_message, messages := as_list(body["messages"]))) or not messages:
            continue
        if system := as_objects(_decoded(attributes.get("gen_ai.system_instructions"))):
            text = "\n".join(str(part.get("content", part.get("text", ""))) for part in system)
            messages = [{"role": "system", "content": text}, *messages]
        tools = _decoded(_first(attributes, _TOOLS)) or body.get("tools")
        answer = _decoded(_first(attributes, _ANSWERS))
        if calls := as_list(attributes.get("ai.response.toolCalls")):
            answer = {"role": "assistant", "content": answer or "", "tool_calls": calls}
        return {**body, "messages": messages, "tools": tools}, answer
    return {}, None


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


def _listed(attributes: Dict) -> Dict:
    """The attributes, with those of numbered names as lists of objects: `a.0.b.c` is `a[0]["b"]["c"]`."""
    listed = {name: value for name, value in attributes.items() if not _NUMBER.search(name)}
    numbered: dict[str, dict[int, Dict]] = {}
    for name, value in attributes.items():
        if found := _NUMBER.search(name):
            items = numbered.setdefault(name[: found.start()], {})
            items.setdefault(int(found[1]), {})[name[found.end() :]] = value
    for name, items in numbered.items():
        listed[name] = [_nested(_listed(item)) for _, item in sorted(items.items())]
    return listed


def _nested(attributes: Dict) -> JsonValue:
    """Names with dots as objects in objects; a value without a name is the value."""
    result: Dict = {}
    for name, value in attributes.items():
        *path, last = name.split(".")
        inner = result
        for key in path:
            # Some write both a value and what is in it.
            inner[key] = inner = as_object(inner.get(key))
        inner.setdefault(last, value)
    return result.get("", result)


def _first(attributes: Dict, names: Iterable[str]) -> JsonValue:
    return next((attributes[name] for name in names if attributes.get(name)), None)


def _decoded(value: JsonValue) -> JsonValue:
    """A value, or that which a string has as JSON."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return msgspec.json.decode(value)
        except (ValueError, RecursionError):
            return value
    return value
