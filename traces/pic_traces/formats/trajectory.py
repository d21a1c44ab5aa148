"""Trajectories of agents: a list of messages in which every assistant's turn is one call.

mini-swe-agent (1.x: the bare list; 2.x: an object), SWE-agent (`.traj`), tau-bench (`traj`), ATIF (Harbor), Gemini CLI,
goose, opencode's export, and chat data sets.
"""

from __future__ import annotations

from collections.abc import Iterator

from pic_traces.formats import parts
from pic_traces.formats.anthropic import is_anthropic
from pic_traces.formats.bodies import as_object, as_objects, find_answer, prompt_tokens_of
from pic_traces.formats.reader import Conversation, Dict, Reader
from pic_traces.lines import Line
from pic_traces.session import JsonValue, Message, Session, as_type

_KEYS = ("messages", "traj", "history", "conversation", "trajectory")
_MARKS = (
    "trajectory_format",
    "info",
    "instance_id",
    "traj",
    "task_id",
    "replay_config",
    "resolved",
    "reward",
    "schema_version",
    "projectHash",
)
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Trajectory(Reader):
    """Implements `Reader`. Turns see all messages before them, or what the step says was sent (SWE-agent)."""

    name = "trajectories (messages with many assistant turns)"

    def __init__(self) -> None:
        self._bare: list[Message] = []
        self._line: Line | None = None

    @staticmethod
    def recognizes(line: Line) -> bool:
        value = line.value
        if _is_message(value):
            return True
        messages = _messages(value)
        if not messages or "turns" in value:
            return False
        if any(mark in value for mark in _MARKS):
            return True
        # The AI SDK's requests may end with an answer.
        is_whole = "parts" not in messages[-1] and find_answer(value) is None
        is_whole = is_whole and [message["role"] for message in parts.to_messages(messages[-1:])][-1:] == ["assistant"]
        return is_whole and not {"model", "stream", "max_tokens"} & value.keys()

    def take(self, line: Line) -> Iterator[Session]:
        if _is_message(line.value):
            self._line = self._line or line
            self._bare.append(line.value)
            return
        steps = as_objects(line.value.get("trajectory"))
        name = next(
            (
                str(line.value[key])
                for key in ("instance_id", "task_id", "session_id", "sessionId", "id")
                if line.value.get(key)
            ),
            "",
        )
        if steps and any("query" in step or "messages" in step for step in steps):
            yield _of_steps(steps, _name(line, name))
        else:
            messages = _messages(line.value)
            tools = line.value.get("tools") or as_object(line.value.get("agent")).get("tool_definitions")
            yield _of_messages(messages, _name(line, name), as_type(tools, list[JsonValue]))

    def end(self) -> Iterator[Session]:
        """The messages that stood in the file one by one."""
        if self._line is not None:
            yield _of_messages(self._bare, _name(self._line, ""), None)


def _of_messages(messages: list[Message], name: str, tools: list[JsonValue] | None) -> Session:
    conversation = Conversation(name)
    is_other = any(map(parts.is_foreign, messages)) or is_anthropic({"messages": [*messages]})
    for recorded in messages:
        response = as_object(as_object(recorded.get("extra")).get("response"))
        for message in parts.to_chat(recorded) if is_other else (recorded,):
            if message.get("role") not in _ROLES:
                continue  # mini-swe-agent's `exit`.
            index = conversation.add({key: value for key, value in message.items() if key != "extra"})
            if message.get("role") == "assistant":
                conversation.call(range(index), index, tools=tools, prompt_tokens=prompt_tokens_of(response, recorded))
    return conversation.session("trajectory")


def _of_atif(step: Dict) -> Iterator[Message]:
    """A step of ATIF's, with what was observed behind it."""
    source = str(step.get("source"))
    role = source if source in ("system", "user") else "assistant"
    if step.get("message") or step.get("tool_calls"):
        yield {**step, "role": role, "content": step.get("message") or ""}
    for result in as_objects(as_object(step.get("observation")).get("results")):
        role = "tool" if result.get("source_call_id") else "user"
        yield {"role": role, "tool_call_id": result.get("source_call_id"), "content": parts.output_of(result)}


def _of_gemini(message: Dict) -> Message:
    """A message of the Gemini CLI's, as one with parts of Gemini's API."""
    text, calls = message.get("content"), as_objects(message.get("toolCalls"))
    said: list[JsonValue] = [*text] if isinstance(text, list) else [{"text": text or ""}]
    said += [{"type": "thinking", "text": one.get("description")} for one in as_objects(message.get("thoughts"))]
    said += [{"functionCall": call} for call in calls]
    said += [result for call in calls for result in as_objects(call.get("result"))]
    return {"role": message["type"], "parts": said, "tokens": message.get("tokens")}


def _of_steps(steps: list[Dict], name: str) -> Session:
    """SWE-agent's: a step has what was sent (`query`), or all messages up to its result (`messages`)."""
    conversation = Conversation(name)
    known: dict[tuple[str, str], int] = {}
    for step in steps:
        sent = as_objects(step.get("query"))
        if not sent:
            sent = as_objects(step.get("messages"))
            turns = [number for number, message in enumerate(sent) if message.get("role") == "assistant"]
            sent = sent[: turns[-1]] if turns else sent
        prompt = []
        for message in sent:
            key = f"{message.get('role')}", f"{message.get('content')}{message.get('tool_calls')}"
            if key not in known:
                known[key] = conversation.add(message)
            prompt.append(known[key])
        answer: Message = {"role": "assistant", "content": step.get("response") or ""}
        if step.get("tool_calls"):
            answer["tool_calls"] = step["tool_calls"]
        conversation.call(prompt, conversation.add(answer))
    return conversation.session("trajectory")


def _messages(value: Dict) -> list[Message]:
    """The list of messages in an object; empty if it has none."""
    if str(value.get("schema_version")).startswith("ATIF"):
        return [message for step in as_objects(value.get("steps")) for message in _of_atif(step)]
    if "projectHash" in value:
        said = as_objects(value.get("messages"))
        return [_of_gemini(message) for message in said if message.get("type") in ("user", "gemini")]
    for key in _KEYS:
        found = value.get(key)
        if isinstance(found, list) and found and all(map(parts.is_message, found)):
            return as_objects(found)
    return []


def _is_message(value: Dict) -> bool:
    return (
        isinstance(value.get("role"), str)
        and "content" in value
        and "messages" not in value
        and value.get("type") != "message"
    )


def _name(line: Line, name: str) -> str:
    return name or f"{line.path.name}{line.place}".replace(" ", "")
