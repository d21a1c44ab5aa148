"""Tools as the OpenAI API has them: schemas, the calls of an assistant, and their results."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

from pic_traces.session import JsonValue, Message

from pic_generate.source_code import make_name
from pic_generate.vocabulary import WORDS, CountTokens, approximate_tokens, make_text


def make_tool(rng: random.Random, num_tokens: int, count_tokens: CountTokens | None = None) -> JsonValue:
    """A schema with a random name, parameters and description, about `num_tokens` tokens long as compact JSON.

    Where `num_tokens` is less than a schema needs (about 40), it has no parameters and a short description.
    """
    count = count_tokens or approximate_tokens
    required: dict[str, str] = {}
    optional: dict[str, str] = {}
    name = f"{make_name(rng)}_{rng.choice(WORDS)}"
    size = count(_compact(_tool(name, "", {}, {})))
    while size < num_tokens * 0.6:
        target = required if len(required) <= len(optional) else optional
        kind = rng.choice(["", "", "int: "])
        target[make_name(rng)] = kind + make_text(rng, rng.randint(6, 16), count_tokens)
        size = count(_compact(_tool(name, "", required, optional)))
    return _tool(name, make_text(rng, max(4, num_tokens - size), count_tokens), required, optional)


def describe_tool(
    tool: JsonValue, rng: random.Random, num_tokens: int, count_tokens: CountTokens | None = None
) -> JsonValue:
    """The same tool with a description of other words, `num_tokens` long."""
    function = _function(tool)
    text = make_text(rng, num_tokens, count_tokens)
    return {"type": "function", "function": {**function, "description": text}}


def tool_name(tool: JsonValue) -> str:
    """The name a tool is called by."""
    return str(_function(tool)["name"])


def tool_call(call_id: str, name: str, arguments: Mapping[str, JsonValue], text: str) -> Message:
    """An assistant's message that says `text` and calls one tool."""
    function: JsonValue = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def tool_result(call_id: str, content: str) -> Message:
    """A tool's result."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _tool(name: str, description: str, required: Mapping[str, str], optional: Mapping[str, str]) -> JsonValue:
    """A schema; the parameters are given as name and description, and a description may begin with `int: `."""
    properties: dict[str, JsonValue] = {}
    for key, text in {**required, **optional}.items():
        is_number = text.startswith("int: ")
        properties[key] = {"type": "integer" if is_number else "string", "description": text.removeprefix("int: ")}
    parameters: JsonValue = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _function(tool: JsonValue) -> dict[str, JsonValue]:
    function = tool["function"] if isinstance(tool, dict) else None
    assert isinstance(function, dict)
    return function


def _compact(value: JsonValue) -> str:
    return json.dumps(value, separators=(",", ":"))
