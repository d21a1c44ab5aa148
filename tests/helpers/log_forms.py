"""One session of three calls in the forms in which public tools record it, with what each form leaves out.

The forms follow their tools' documentation; the text is made here. `right` counts by jinja2 and tokenizers alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Json = dict[str, Any]

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ '<|t|>' + (tool | tojson) + '\\n' }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<|c|>' + c.function.name + (c.function.arguments | tojson) }}{% endfor %}"
    "{{ '<|e|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<|t|>", "<|c|>", "<|e|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
START = 1_780_754_400


class Call(NamedTuple):
    """A request and its answer, in OpenAI's form."""

    number: int
    messages: list[Json]
    tools: list[Json]
    answer: Json

    @property
    def body(self) -> Json:
        return {"model": "m", "messages": self.messages, "tools": self.tools}

    @property
    def response(self) -> Json:
        choice = {"index": 0, "message": self.answer, "finish_reason": "stop"}
        return {"id": f"r{self.number}", "object": "chat.completion", "choices": [choice]}

    @property
    def at(self) -> int:
        """Seconds."""
        return START + 60 * self.number

    @property
    def clock(self) -> str:
        return f"2026-06-06T14:{self.number:02}:00Z"


def make_calls(seed: int = 5) -> list[Call]:
    """The session: each call has the history of the one before, a call of a tool and its result."""
    rng = random.Random(seed)
    words = [f"{a}{b}" for a in ("tor", "bel", "mir", "sol", "ul") for b in ("vak", "nen", "rit", "dor")]

    def text(num: int) -> str:
        return " ".join(rng.choice(words) for _ in range(num)) + '. "Oui", dit-il: été,\n' + rng.choice(words)

    def tool(name: str) -> Json:
        schema = {"type": "object", "properties": {"path": {"type": "string", "description": text(9)}}}
        return {"type": "function", "function": {"name": name, "description": text(20), "parameters": schema}}

    tools = [tool("read_file"), tool("list_files")]
    messages: list[Json] = [{"role": "system", "content": text(60)}, {"role": "user", "content": text(40)}]
    calls = []
    for number in range(3):
        made = {"name": "read_file", "arguments": json.dumps({"path": f"src/{rng.choice(words)}.py"})}
        tool_calls = [{"id": f"call_{number}", "type": "function", "function": made}]
        answer = {"role": "assistant", "content": text(12), "tool_calls": tool_calls}
        calls.append(Call(number, deepcopy(messages), tools, answer))
        messages += [answer, {"role": "tool", "tool_call_id": f"call_{number}", "content": text(50)}]
    return calls


def write_model(folder: Path, calls: Sequence[Call]) -> Path:
    """A folder with a small tokenizer, trained on the session, and the template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([json.dumps(call.body, ensure_ascii=False) for call in calls], trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|e|>"}))
    return folder


def right(folder: Path, calls: Sequence[Call], *, answers: bool = True) -> list[tuple[int, int]]:
    """Prompt tokens and prefix hits of each call, against all earlier prompts and their answers."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    environment = jinja2.Environment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(TEMPLATE)

    def ids(messages: list[Json], tools: list[Json], *, is_prompt: bool) -> list[int]:
        parsed = deepcopy(messages)
        for message in parsed:
            for made in message.get("tool_calls") or []:
                made["function"]["arguments"] = json.loads(made["function"]["arguments"])
        text = template.render(messages=parsed, tools=tools, add_generation_prompt=is_prompt)
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    kept: list[list[int]] = []
    counts = []
    for call in calls:
        prompt = ids(call.messages, call.tools, is_prompt=True)
        hit = max((_shared(prompt, path) for path in kept), default=0)
        counts.append((len(prompt), hit))
        kept.append(ids([*call.messages, call.answer], call.tools, is_prompt=False) if answers else prompt)
    return counts


def _shared(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Form(NamedTuple):
    """How a tool writes the calls, and what it leaves out: `tools`, `system`, `calls` (of tools), `answers`."""

    name: str
    write: Callable[[list[Call]], str]
    lacks: tuple[str, ...] = ()

    def seen(self, calls: Sequence[Call]) -> list[Call]:
        """The calls without what the form leaves out."""
        seen = []
        for call in calls:
            messages = deepcopy(call.messages)
            if "system" in self.lacks:
                messages = messages[1:]
            if "calls" in self.lacks:
                messages = [{"role": one["role"], "content": one["content"]} for one in messages]
            tools = [] if "tools" in self.lacks else call.tools
            answer = {**call.answer, "tool_calls": []} if "calls" in self.lacks else call.answer
            seen.append(Call(call.number, messages, tools, answer))
        return seen


def _lines(*values: Any) -> str:
    return "".join(
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n" for value in values
    )


def _said(call: Call) -> Json:
    """What a gateway writes of a call."""
    return {"request": call.body, "response": call.response}


def _parsed(made: Json) -> Any:
    return json.loads(made["function"]["arguments"])


def _otlp(spans: list[Json]) -> str:
    def value(one: Any) -> Json:
        return {"stringValue": one if isinstance(one, str) else json.dumps(one)}

    for number, span in enumerate(spans):
        span.setdefault("traceId", "t")
        span.setdefault("spanId", f"s{number}")
        span["attributes"] = [{"key": key, "value": value(one)} for key, one in span["attributes"].items()]
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})


def loki_answer(calls: list[Call]) -> str:
    """Loki's `query_range`, newest first, with the time in nanoseconds beside each line."""
    values = [[str(call.at * 10**9), f"INFO gateway: {json.dumps(_said(call))}"] for call in calls[::-1]]
    return json.dumps(
        {"status": "success", "data": {"resultType": "streams", "result": [{"stream": {}, "values": values}]}}
    )


def logcli(calls: list[Call]) -> str:
    """`logcli -o jsonl`, newest first."""
    return _lines(*({"labels": {}, "line": json.dumps(_said(call)), "timestamp": call.clock} for call in calls[::-1]))


def elastic(calls: list[Call]) -> str:
    """A search's answer; the application's line is in `message`."""
    sources = [{"@timestamp": call.clock, "message": json.dumps(_said(call)), "host": {"name": "h"}} for call in calls]
    return json.dumps({"took": 1, "hits": {"total": 3, "hits": [{"_id": "x", "_source": one} for one in sources]}})


def cloudwatch(calls: list[Call]) -> str:
    """`aws logs filter-log-events`."""
    events = [
        {"timestamp": call.at * 1000, "message": f"req {json.dumps(_said(call))}", "eventId": "e"} for call in calls
    ]
    return json.dumps({"events": events, "searchedLogStreams": []}, indent=1)


def kubernetes(calls: list[Call]) -> str:
    """containerd's lines, which it cuts at 16 KiB (here at 900 characters)."""
    rows = []
    for call in calls:
        text = json.dumps(_said(call))
        pieces = [text[at : at + 900] for at in range(0, len(text), 900)]
        rows += [f"{call.clock} stdout {'F' if piece is pieces[-1] else 'P'} {piece}" for piece in pieces]
    return _lines(*rows)


def docker_cut(calls: list[Call]) -> str:
    """Docker's json-file, which cuts lines at 16 KiB."""
    rows = []
    for call in calls:
        text = json.dumps({"pad": "x" * 40_000, **_said(call)}) + "\n"
        pieces = [text[at : at + 16_384] for at in range(0, len(text), 16_384)]
        rows += [{"log": piece, "stream": "stdout", "time": call.clock} for piece in pieces]
    return _lines(*rows)


def fluent_bit(calls: list[Call]) -> str:
    """Fluent Bit's records of containers, without line ends; other lines between."""
    rows = [{"log": json.dumps(_said(call)), "stream": "stdout", "time": call.clock} for call in calls]
    return _lines({"log": "gateway up", "stream": "stdout", "time": calls[0].clock}, *rows)


def journal(calls: list[Call]) -> str:
    """`journalctl -o json`."""
    other = {"MESSAGE": "Started the gateway.", "__REALTIME_TIMESTAMP": f"{START * 10**6}", "_PID": "1"}
    rows = ({"MESSAGE": json.dumps(_said(call)), "__REALTIME_TIMESTAMP": f"{call.at * 10**6}"} for call in calls)
    return _lines(other, *rows)


def google_logging(calls: list[Call]) -> str:
    """`gcloud logging read --format json`, newest first."""
    return json.dumps([{"insertId": "i", "jsonPayload": _said(call), "timestamp": call.clock} for call in calls[::-1]])


def splunk(calls: list[Call]) -> str:
    """Splunk's export: a result a line, with the line as it was in `_raw`."""
    return _lines(
        *({"preview": False, "result": {"_raw": json.dumps(_said(call)), "_time": call.clock}} for call in calls)
    )


def braintrust(calls: list[Call]) -> str:
    """Braintrust's logs: messages in `input`, choices in `output`, tools in `metadata`; a task's span around a call."""
    rows = []
    for call in calls:
        kept = {"id": f"i{call.number}", "created": call.clock, "root_span_id": "r", "input": call.messages}
        rows.append({**kept, "id": "t", "span_id": "p", "span_attributes": {"type": "task"}, "output": "x"})
        more = {"output": call.response["choices"], "metadata": {"model": "m", "tools": call.tools}}
        rows.append({**kept, **more, "span_id": f"s{call.number}", "span_attributes": {"type": "llm"}})
    return _lines(*rows)


def _langchain(message: Json) -> Json:
    name = {"system": "SystemMessage", "user": "HumanMessage", "assistant": "AIMessage", "tool": "ToolMessage"}
    fields = {key: value for key, value in message.items() if key != "role"}
    calls = [
        {"name": one["function"]["name"], "args": _parsed(one), "id": one["id"], "type": "tool_call"}
        for one in fields.pop("tool_calls", [])
    ]
    path = ["langchain", "schema", "messages", name[message["role"]]]
    return {
        "lc": 1,
        "type": "constructor",
        "id": path,
        "kwargs": {**fields, **({"tool_calls": calls} if calls else {})},
    }


def langsmith(calls: list[Call]) -> str:
    """LangSmith's runs of LangChain: constructors in a list of lists; a chain's run around a call."""
    rows = []
    for call in calls:
        run = {"id": f"i{call.number}", "trace_id": "t", "start_time": call.clock}
        inputs = {"messages": [[_langchain(message) for message in call.messages]]}
        rows.append({**run, "id": "c", "run_type": "chain", "inputs": {"messages": call.messages}, "outputs": {}})
        outputs = {"generations": [[{"message": _langchain(call.answer), "text": ""}]]}
        params = {"extra": {"invocation_params": {"tools": call.tools}}}
        rows.append({**run, "run_type": "llm", "inputs": inputs, "outputs": outputs, **params})
    return _lines(*rows)


def langfuse(calls: list[Call]) -> str:
    """Langfuse's export of a trace, newest first; the OpenAI wrapper keeps the body's messages and tools."""
    found = []
    for call in calls[::-1]:
        row = {"id": f"o{call.number}", "traceId": "t", "startTime": call.clock}
        found.append({**row, "type": "SPAN", "name": "agent", "input": {"messages": call.messages}})
        body = {"messages": call.messages, "tools": call.tools}
        found.append({**row, "type": "GENERATION", "name": "OpenAI", "input": body, "output": call.answer})
    return json.dumps({"trace": {"id": "t", "name": "x"}, "observations": found})


def mlflow(calls: list[Call]) -> str:
    """MLflow's trace: spans with their inputs as JSON in attributes."""
    spans = []
    for call in calls:
        inputs = {"mlflow.spanInputs": json.dumps(call.body), "mlflow.spanOutputs": json.dumps(call.response)}
        span = {"name": "Completions", "start_time_unix_nano": call.at * 10**9, "span_id": f"s{call.number}"}
        spans.append({**span, "trace_id": "t", "attributes": {**inputs, "mlflow.spanType": '"CHAT_MODEL"'}})
        around = {"mlflow.spanInputs": json.dumps(call.body), "mlflow.spanType": '"AGENT"'}
        spans.append({**span, "trace_id": "t", "span_id": "a", "attributes": around})
    return json.dumps({"info": {"trace_id": "t", "state": "OK"}, "data": {"spans": spans}})


def openinference(calls: list[Call]) -> str:
    """OpenInference's numbered attributes, newest first, with tools, and a chain's span around each."""
    spans = []
    for call in calls[::-1]:
        names: Json = {"openinference.span.kind": "LLM"}
        for number, message in enumerate(call.messages):
            begin = f"llm.input_messages.{number}.message"
            names |= {f"{begin}.role": message["role"], f"{begin}.contents.0.message_content.type": "text"}
            names[f"{begin}.contents.0.message_content.text"] = message["content"]
            if "tool_call_id" in message:
                names[f"{begin}.tool_call_id"] = message["tool_call_id"]
            for at, made in enumerate(message.get("tool_calls", [])):
                names[f"{begin}.tool_calls.{at}.tool_call.function.name"] = made["function"]["name"]
                names[f"{begin}.tool_calls.{at}.tool_call.function.arguments"] = made["function"]["arguments"]
        for number, tool in enumerate(call.tools):
            names[f"llm.tools.{number}.tool.json_schema"] = json.dumps(tool)
        out = "llm.output_messages.0.message"
        names |= {f"{out}.role": "assistant", f"{out}.content": call.answer["content"]}
        made = call.answer["tool_calls"][0]["function"]
        names |= {f"{out}.tool_calls.0.tool_call.function.{key}": value for key, value in made.items()}
        spans.append({"startTimeUnixNano": str(call.at * 10**9), "attributes": names})
        chain = {"openinference.span.kind": "CHAIN", "input.value": json.dumps({"messages": call.messages})}
        spans.append({"startTimeUnixNano": str(call.at * 10**9), "attributes": chain})
    return _otlp(spans)


def doubled_spans(calls: list[Call]) -> str:
    """Two instrumentations at once: GenAI's messages, and OpenLLMetry's inside of each."""
    spans = []
    for call in calls:
        at = {"startTimeUnixNano": str(call.at * 10**9)}
        body = {"gen_ai.input.messages": call.messages, "gen_ai.tool.definitions": call.tools}
        spans.append(
            {**at, "spanId": f"a{call.number}", "attributes": {**body, "gen_ai.output.messages": [call.answer]}}
        )
        names: Json = {}
        for number, message in enumerate(call.messages):
            names |= {f"gen_ai.prompt.{number}.{key}": message[key] for key in message if key != "tool_calls"}
            for place, made in enumerate(message.get("tool_calls", [])):
                begin = f"gen_ai.prompt.{number}.tool_calls.{place}"
                names |= {f"{begin}.id": made["id"], f"{begin}.name": made["function"]["name"]}
                names[f"{begin}.arguments"] = made["function"]["arguments"]
        spans.append({**at, "spanId": f"b{call.number}", "parentSpanId": f"a{call.number}", "attributes": names})
    return _otlp(spans)


def pi(calls: list[Call]) -> str:
    """pi's session: entries that name the one before them."""
    rows: list[Json] = [{"type": "session", "version": 3, "id": "s", "timestamp": calls[0].clock, "cwd": "/w"}]
    parent = None
    for number, message in enumerate([*calls[-1].messages[1:], calls[-1].answer]):
        text = {"type": "text", "text": message["content"]}
        made = [
            {"type": "toolCall", "id": one["id"], "name": one["function"]["name"], "arguments": _parsed(one)}
            for one in message.get("tool_calls", [])
        ]
        said = {"role": message["role"], "content": [text, *made]}
        if message["role"] == "tool":
            said |= {"role": "toolResult", "toolCallId": message["tool_call_id"], "toolName": "read_file"}
        rows.append({"type": "message", "id": f"e{number}", "parentId": parent, "message": said})
        parent = f"e{number}"
    return _lines(*rows)


def goose(calls: list[Call]) -> str:
    """goose's session: messages one a line, with requests of tools and responses."""
    rows: list[Json] = [{"working_dir": "/w", "description": "d", "message_count": 6}]
    for message in [*calls[-1].messages[1:], calls[-1].answer]:
        content: list[Json] = [{"type": "text", "text": message["content"]}]
        for one in message.get("tool_calls", []):
            value = {"name": one["function"]["name"], "arguments": _parsed(one)}
            content.append({"type": "toolRequest", "id": one["id"], "toolCall": {"status": "success", "value": value}})
        if message["role"] == "tool":
            result = {"status": "success", "value": content}
            content = [{"type": "toolResponse", "id": message["tool_call_id"], "toolResult": result}]
        role = "user" if message["role"] == "tool" else message["role"]
        rows.append({"role": role, "created": START, "content": content})
    return _lines(*rows)


def opencode(calls: list[Call]) -> str:
    """`opencode export`: messages with `info` and `parts`; a tool's part has its call and its result."""
    results = {one["tool_call_id"]: one["content"] for one in calls[-1].messages if one["role"] == "tool"}
    found = []
    for message in [*calls[-1].messages[1:], calls[-1].answer]:
        parts: list[Json] = [{"type": "step-start"}, {"type": "text", "text": message["content"]}]
        for one in message.get("tool_calls", []):
            state = {"status": "completed", "input": _parsed(one), "output": results.get(one["id"], "")}
            parts.append({"type": "tool", "callID": one["id"], "tool": one["function"]["name"], "state": state})
        if message["role"] != "tool":
            found.append({"info": {"id": "m", "role": message["role"]}, "parts": parts})
    return json.dumps({"info": {"id": "ses", "title": "t"}, "messages": found}, indent=1)


def useful_chat(calls: list[Call]) -> str:
    """Bodies of the AI SDK's `useChat`: each tool's part has its call and its result."""
    rows = []
    for call in calls:
        results = {one["tool_call_id"]: one["content"] for one in call.messages if one["role"] == "tool"}
        messages = []
        for number, message in enumerate(call.messages):
            parts: list[Json] = [{"type": "text", "text": message["content"]}]
            for one in message.get("tool_calls", []):
                state = {"state": "output-available", "input": _parsed(one), "output": results[one["id"]]}
                parts.append({"type": f"tool-{one['function']['name']}", "toolCallId": one["id"], **state})
            if message["role"] != "tool":
                messages.append({"id": f"{number}", "role": message["role"], "parts": parts})
        rows.append({"id": "chat", "messages": messages, "trigger": "submit-message"})
    return _lines(*rows)


def helicone(calls: list[Call]) -> str:
    """Helicone's export, newest first, with a call that was refused (429) before its retry."""
    rows = []
    for call in calls[::-1]:
        row = {"request_id": f"q{call.number}", "request_created_at": call.clock, "request_body": call.body}
        rows.append({**row, "response_status": 200, "response_body": call.response})
        refused = {"response_status": 429, "response_body": {"error": {"message": "slow down"}}}
        rows.append({**row, "request_id": f"x{call.number}", **refused})
    return _lines(*rows)


def kong(calls: list[Call]) -> str:
    """Kong's AI proxy: the bodies as strings under `ai.proxy.payload`."""
    rows = []
    for call in calls:
        payload = {"request": json.dumps(call.body), "response": json.dumps(call.response)}
        row = {"ai": {"proxy": {"payload": payload, "meta": {"plugin_id": "p"}}}, "started_at": call.at * 1000}
        rows.append({**row, "request": {"uri": "/v1", "method": "POST"}, "response": {"status": 200}})
    return _lines(*rows)


def openpipe(calls: list[Call]) -> str:
    """OpenPipe's export: the whole request in `input`."""
    return _lines(*({"input": call.body, "output": call.response, "tags": {}} for call in calls))


def batches(calls: list[Call]) -> str:
    """Requests of Anthropic's batches, with blocks: the tools are Anthropic's."""
    rows = []
    for call in calls:
        system, *rest = call.messages
        messages: list[Json] = []
        for message in rest:
            blocks: list[Json] = [{"type": "text", "text": message["content"]}]
            for one in message.get("tool_calls", []):
                use = {"id": one["id"], "name": one["function"]["name"], "input": _parsed(one)}
                blocks.append({"type": "tool_use", **use})
            if message["role"] == "tool":
                result = {"tool_use_id": message["tool_call_id"], "content": message["content"]}
                blocks = [{"type": "tool_result", **result}]
            messages.append({"role": "user" if message["role"] == "tool" else message["role"], "content": blocks})
        body = {"model": "m", "system": system["content"], "messages": messages, "max_tokens": 9}
        rows.append({"custom_id": f"c{call.number}", "params": body})
    return _lines(*rows)


def gateway_twice(calls: list[Call]) -> str:
    """A gateway that writes each call when it arrives and when it is answered, and text around the JSON."""
    rows = []
    for call in calls:
        begin = f"{call.clock} [req] "
        rows.append(begin + json.dumps({"request_id": f"q{call.number}", "request": call.body}))
        rows.append(begin + json.dumps({"request_id": f"q{call.number}", **_said(call)}))
    return _lines("gateway 1.2 starts", *rows)


def ollama(calls: list[Call]) -> str:
    """Ollama's native API: arguments are objects, and the answer is a `message`."""
    rows = []
    for call in calls:
        body = deepcopy(call.body)
        for message in body["messages"]:
            for one in message.get("tool_calls", []):
                one["function"] = {**one["function"], "arguments": _parsed(one)}
        response = {"model": "m", "created_at": call.clock, "message": call.answer, "done": True}
        rows.append({"request": body, "response": response})
    return _lines(*rows)


FORMS = (
    Form("loki_answer.json", loki_answer),
    Form("logcli.jsonl", logcli),
    Form("elastic.json", elastic),
    Form("cloudwatch.json", cloudwatch),
    Form("kubernetes.log", kubernetes),
    Form("docker_cut.log", docker_cut),
    Form("fluent_bit.log", fluent_bit),
    Form("journal.json", journal),
    Form("google_logging.json", google_logging),
    Form("splunk.json", splunk),
    Form("braintrust.jsonl", braintrust),
    Form("langsmith.jsonl", langsmith),
    Form("langfuse.json", langfuse),
    Form("mlflow.json", mlflow),
    Form("openinference.json", openinference),
    Form("doubled_spans.json", doubled_spans),
    Form("pi.jsonl", pi, ("system", "tools")),
    Form("goose.jsonl", goose, ("system", "tools")),
    Form("opencode.json", opencode, ("system", "tools")),
    Form("useful_chat.jsonl", useful_chat, ("tools", "answers")),
    Form("helicone.jsonl", helicone),
    Form("kong.jsonl", kong),
    Form("openpipe.jsonl", openpipe),
    Form("batches.jsonl", batches, ("tools", "answers")),
    Form("gateway_twice.log", gateway_twice),
    Form("ollama.jsonl", ollama),
)
