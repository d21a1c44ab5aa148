"""Formats that are known and not read: what they are, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable

from pic_traces.formats.bodies import as_objects, is_other_span
from pic_traces.formats.reader import Dict
from pic_traces.lines import Line, what_is_wrong

NO_JSON = "no line of JSON"
"""The reason for any other text, such as what a server writes between the requests that it logs."""

NO_MODEL = "a span of a tool, an agent or a framework, not of a model"
"""The reason for what tracers write around the calls of models."""

_RECORD = "log the requests instead (bodies of /v1/chat/completions, one a line)"


def refusal(line: Line) -> str:
    """Why a line that no reader takes is not read, in one sentence that is the same for all lines of its kind."""
    if line.text:
        return _of_text(line.text)
    found = next((what for is_it, what in _KNOWN if is_it(line.value)), None)
    return found or (
        f"unknown trace format: its keys are {', '.join(sorted(line.value)[:12]) or '(none)'}; expected `messages` (a "
        "chat request), `messages` and `turns` (a recorded session), or another of the formats of `pic_traces`; "
        "--reader MODULE:FUNCTION reads any other"
    )


_KNOWN: tuple[tuple[Callable[[Dict], bool], str], ...] = (
    (
        lambda value: bool({"hash_ids", "hash_id_scope"} & value.keys()),
        f"a serving trace, of lengths and block ids: it has no text; {_RECORD}",
    ),
    (is_other_span, NO_MODEL),
    (
        lambda value: {"observations", "trace"} <= value.keys() or {"traceId", "type", "startTime"} <= value.keys(),
        f"a Langfuse export whose generations have no messages; {_RECORD}",
    ),
    (
        lambda value: value.get("error") is not None and not {"messages", "input"} & value.keys(),
        "an error, without the request that it answers",
    ),
    (
        lambda value: bool({"choices", "candidates"} & value.keys()),
        "an answer without its request; let the logger write both in one line",
    ),
    (
        lambda value: "eval" in value and bool({"samples", "plan"} & value.keys()),
        f"an inspect_ai log; {_RECORD}, or write `samples[].events[].call.request` one a line",
    ),
    (
        lambda value: any("from" in turn for turn in as_objects(value.get("conversations"))),
        "a ShareGPT data set: texts without calls; `sglang.bench_serving` sends it, with --dataset-name sharegpt",
    ),
    (
        lambda value: "prompt" in value,
        f"a request of /v1/completions (`prompt`): raw prompts are not read; {_RECORD}",
    ),
    (
        lambda value: "sampling_params" in value or (len(value) <= 3 and bool({"text", "input_ids"} & value.keys())),
        f"a request of SGLang's /generate: raw prompts are not read; {_RECORD}",
    ),
    (
        lambda value: {"request_parameters", "prompt_tokens"} <= value.keys(),
        "SGLang's --export-metrics-to-file: it has no messages; record with --log-requests --log-requests-level 3",
    ),
    (
        lambda value: isinstance(value.get("input"), str | list) and not as_objects(value["input"]),
        "a request of /v1/embeddings, which has no prompt",
    ),
    (
        lambda value: bool({"input", "inputs"} & value.keys()),
        "a span or a row with an `input` that has no messages of a form that is known; "
        f"{_RECORD}, or read it with --reader",
    ),
)


def _of_text(text: str) -> str:
    if text.lower().startswith("timestamp,"):
        return "a table of lengths and times, without text"
    if "Received request" in text and "SamplingParams" in text:
        return "vLLM's request log: it has no messages; record in front of vLLM, e.g. with LiteLLM"
    if text.lstrip().startswith("{"):
        return "bad JSON; a trace is JSONL, one JSON object a line (gzip or plain)"
    wrong = what_is_wrong(text)
    return NO_JSON if wrong.startswith("bad JSON") else wrong
