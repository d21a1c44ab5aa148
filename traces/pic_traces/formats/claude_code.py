"""Claude Code's session files, what it prints with `--output-format stream-json`, and pi's session files.

All have a line for each block or message that was sent or answered. In session files it names the line before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pic_traces.formats.bodies import as_object, prompt_tokens_of
from pic_traces.formats.parts import to_chat
from pic_traces.formats.reader import Conversation, Dict, Reader
from pic_traces.lines import Line
from pic_traces.session import Message, Session

_KINDS = (
    "user",
    "assistant",
    "system",
    "summary",
    "attachment",
    "progress",
    "file-history-snapshot",
    "queue-operation",
    "result",
    "stream_event",
)
_SYNTHETIC = "<synthetic>"


@dataclass(slots=True)
class _Node:
    """A line of a session."""

    parent: str | None
    messages: list[Message]
    answer: str = ""
    """The id of the response that it is a block of."""
    agent: str | None = None
    prompt_tokens: int | None = None
    kept: str = ""
    """Of a compaction of pi's: the first line that stays in the prompt, behind the summary."""
    indices: list[int] = field(default_factory=list)


class ClaudeCode(Reader):
    """Implements `Reader`. Each response is a call; it was sent the lines before it, up to the root or a compaction."""

    name = "sessions of Claude Code and pi"
    note = (
        "Claude Code's and pi's session files have neither the system prompt nor the tools; a gateway between the "
        "agent and the model records all of it"
    )

    def __init__(self) -> None:
        self._sessions: dict[str, dict[str, _Node]] = {}

    @staticmethod
    def recognizes(line: Line) -> bool:
        value = line.value
        if "parentId" in value or (value.get("type") == "session" and "cwd" in value):
            return "type" in value
        if value.get("type") in ("user", "assistant") and "message" in value:
            return bool({"uuid", "sessionId", "session_id"} & value.keys())
        return value.get("type") in _KINDS and bool(
            {"sessionId", "session_id", "leafUuid", "snapshot", "uuid"} & value.keys()
        )

    def take(self, line: Line) -> Iterator[Session]:
        value, message = line.value, as_object(line.value.get("message"))
        kind = value.get("type")
        if "parentId" in value:
            value = {**value, "uuid": value.get("id"), "parentUuid": value["parentId"]}
            kind = message.get("role")
            if summary := value.get("summary"):
                message, kind = {"role": "user", "content": summary}, "user"
        uuid = value.get("uuid", line.place if message else None)
        if not isinstance(uuid, str):
            return
        nodes = self._sessions.setdefault(str(value.get("sessionId") or value.get("session_id") or line.path.name), {})
        parent = value.get("parentUuid")
        node = _Node(parent if isinstance(parent, str) else None, [])
        if value.get("isSidechain") or value.get("parent_tool_use_id"):
            node.agent = str(value.get("agentId") or value.get("parent_tool_use_id") or "subagent")
        node.kept = str(value.get("firstKeptEntryId") or "")
        nodes.setdefault(uuid, node)
        if kind not in ("user", "assistant", "toolResult"):
            return
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | list):
            raise line.error("a line of Claude Code with no message")
        node.messages = [*to_chat(message)]
        if kind == "assistant" and message.get("model") != _SYNTHETIC:
            node.answer = str(message.get("id") or uuid)
            node.prompt_tokens = prompt_tokens_of(message)
        return
        yield

    def end(self) -> Iterator[Session]:
        """The sessions of the file."""
        for session_id, nodes in self._sessions.items():
            if not any(node.parent for node in nodes.values()):
                # Some writers name no parents: then it is the agent's line before.
                last: dict[str | None, str] = {}
                for uuid, node in nodes.items():
                    node.parent = last.get(node.agent)
                    last[node.agent] = uuid
            conversation = Conversation(session_id)
            blocks: dict[str, list[_Node]] = {}
            # Results of calls that were made side by side do not stand in one chain.
            results: dict[str, list[int]] = {}
            for node in nodes.values():
                if node.answer:
                    blocks.setdefault(node.answer, []).append(node)
                else:
                    node.indices = [conversation.add(message) for message in node.messages]
                    parent = nodes.get(node.parent or "")
                    if parent is not None and parent.answer and node.messages[:1]:
                        results.setdefault(parent.answer, []).extend(node.indices)
            for parts in blocks.values():
                self._add_call(conversation, nodes, parts, results)
            if conversation.specs:
                yield conversation.session("claude-code")

    @staticmethod
    def _add_call(
        conversation: Conversation, nodes: dict[str, _Node], parts: list[_Node], results: dict[str, list[int]]
    ) -> None:
        """A call whose answer was written in several lines, of which the first has all of it from here on."""
        first = parts[0]
        first.indices = [conversation.add(_joined([message for part in parts for message in part.messages]))]
        prompt: list[int] = []
        summary, kept = list[int](), ""
        at, seen = first.parent or "", 0
        while (node := nodes.get(at)) is not None and seen <= len(nodes):
            beside = results.get(node.answer, []) if node.indices and node.answer else []
            here = [*node.indices, *(index for index in beside if _is_result(conversation, index, prompt))]
            if node.kept and not kept:
                summary, kept = here, node.kept
            elif not node.kept:
                prompt[:0] = here
            at, seen = "" if at == kept else node.parent or "", seen + 1
        prompt[:0] = summary
        tokens = next((part.prompt_tokens for part in parts if part.prompt_tokens), None)
        conversation.call(prompt, first.indices[0], agent=first.agent, prompt_tokens=tokens)


def _is_result(conversation: Conversation, index: int, prompt: list[int]) -> bool:
    """Whether a message is a tool's result that a prompt lacks."""
    return index not in prompt and conversation.pool[index].get("role") == "tool"


def _joined(messages: list[Message]) -> Message:
    whole: Message = {"role": "assistant", "content": ""}
    texts = [str(message["content"]) for message in messages if message.get("content")]
    thoughts = [str(message["reasoning_content"]) for message in messages if message.get("reasoning_content")]
    calls = [call for message in messages for call in _calls(message)]
    whole["content"] = "\n".join(texts)
    if thoughts:
        whole["reasoning_content"] = "\n".join(thoughts)
    if calls:
        whole["tool_calls"] = [*calls]
    return whole


def _calls(message: Message) -> list[Dict]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
