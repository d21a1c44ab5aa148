"""Claude Code's session files: a line for each block that was sent or answered, each naming the line before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from pic_traces.formats.anthropic import to_chat
from pic_traces.formats.bodies import as_object, prompt_tokens_of
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
    indices: list[int] = field(default_factory=list)


class ClaudeCode(Reader):
    """Implements `Reader`. Each response is a call; it was sent the lines before it, up to the root or a compaction."""

    name = "Claude Code sessions"
    note = (
        "Claude Code's session files have neither the system prompt nor the tools; a gateway between Claude Code and "
        "the model records all of it"
    )

    def __init__(self) -> None:
        self._sessions: dict[str, dict[str, _Node]] = {}

    @staticmethod
    def recognizes(line: Line) -> bool:
        value = line.value
        if value.get("type") in ("user", "assistant") and "message" in value:
            return "uuid" in value or "sessionId" in value
        return value.get("type") in _KINDS and bool({"sessionId", "leafUuid", "snapshot", "uuid"} & value.keys())

    def take(self, line: Line) -> Iterator[Session]:
        value, message = line.value, as_object(line.value.get("message"))
        uuid = value.get("uuid")
        if not isinstance(uuid, str):
            return
        nodes = self._sessions.setdefault(str(value.get("sessionId", line.path.name)), {})
        parent = value.get("parentUuid")
        node = _Node(parent if isinstance(parent, str) else None, [])
        if value.get("isSidechain"):
            node.agent = str(value.get("agentId") or "subagent")
        nodes.setdefault(uuid, node)
        if value.get("type") not in ("user", "assistant"):
            return
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | list):
            raise line.error("a line of Claude Code with no message")
        node.messages = [*to_chat(message)]
        if value["type"] == "assistant" and message.get("model") != _SYNTHETIC:
            node.answer = str(message.get("id") or uuid)
            node.prompt_tokens = prompt_tokens_of(message)
        return
        yield

    def end(self) -> Iterator[Session]:
        """The sessions of the file."""
        for session_id, nodes in self._sessions.items():
            if not any(node.parent for node in nodes.values()):
                # Some writers name no parents: then it is the line before.
                for before, uuid in pairwise(nodes):
                    nodes[uuid].parent = before
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
        node, seen = nodes.get(first.parent or ""), 0
        while node is not None and seen <= len(nodes):
            beside = results.get(node.answer, []) if node.indices and node.answer else []
            prompt[:0] = [*node.indices, *(index for index in beside if _is_result(conversation, index, prompt))]
            node, seen = nodes.get(node.parent or ""), seen + 1
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
