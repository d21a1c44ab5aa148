"""Tools as the OpenAI API has them: schemas, the calls of an assistant, and their results."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

from pic_traces.generate.source_code import make_name
from pic_traces.session import JsonValue, Message
from pic_traces.vocabulary import WORDS, CountTokens, approximate_tokens, make_text

__all__ = [
    "CODING_TOOLS",
    "LOAD_SKILL",
    "START_AGENT",
    "describe_tool",
    "make_tool",
    "tool_call",
    "tool_name",
    "tool_result",
]


def _tool(name: str, description: str, required: Mapping[str, str], optional: Mapping[str, str]) -> JsonValue:
    """A schema; the parameters are given as name and description, and a description may begin with `int: `."""
    properties: dict[str, JsonValue] = {}
    for key, text in {**required, **optional}.items():
        is_number = text.startswith("int: ")
        properties[key] = {"type": "integer" if is_number else "string", "description": text.removeprefix("int: ")}
    parameters: JsonValue = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


CODING_TOOLS: tuple[JsonValue, ...] = (
    _tool(
        "read_file",
        "Read a text file of the project. Long files are cut; ask for the lines that follow.",
        {"path": "Path of the file, relative to the project."},
        {"first_line": "int: First line to read, from 1.", "num_lines": "int: How many lines to read at most."},
    ),
    _tool(
        "search_text",
        "Find a regular expression in the files of the project and show each match with the lines around it.",
        {"pattern": "The regular expression."},
        {"folder": "Only look below this folder.", "context": "int: Lines to show before and after a match."},
    ),
    _tool(
        "edit_file",
        "Replace one passage of a file. The old text must occur exactly once.",
        {"path": "Path of the file.", "old_text": "The passage as it is.", "new_text": "What to put in its place."},
        {},
    ),
    _tool(
        "run_command",
        "Run a shell command in the project's folder and show what it prints.",
        {"command": "The command line."},
        {"timeout_s": "int: Seconds after which the command is ended."},
    ),
)
"""What a coding agent can do."""

START_AGENT: JsonValue = _tool(
    "start_agent",
    "Give a task to another agent, which begins with an empty conversation and reports back when it has finished.",
    {"title": "The task in a few words.", "task": "Everything that the agent has to know."},
    {},
)
"""How an agent starts another one."""


LOAD_SKILL: JsonValue = _tool(
    "load_skill",
    "Show the instructions of a skill. Load a skill before you do the work that it is for.",
    {"name": "Name of the skill."},
    {},
)
"""How an agent asks for a skill."""


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
    """What a tool gave back."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _function(tool: JsonValue) -> dict[str, JsonValue]:
    function = tool["function"] if isinstance(tool, dict) else None
    assert isinstance(function, dict)
    return function


def _compact(value: JsonValue) -> str:
    return json.dumps(value, separators=(",", ":"))
