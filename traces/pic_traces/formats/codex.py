"""Codex's rollouts: the items of the Responses API, one a line, as the agent sent and got them."""

from __future__ import annotations

from collections.abc import Iterator

from pic_traces.formats.bodies import as_object, as_objects, prompt_tokens_of
from pic_traces.formats.reader import Conversation, Dict, Reader
from pic_traces.formats.responses import to_message, to_messages
from pic_traces.lines import Line
from pic_traces.session import Session

_KINDS = ("session_meta", "response_item", "turn_context", "event_msg", "compacted")
_ITEMS = (
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "local_shell_call", "local_shell_call_output", "web_search_call", "ghost_snapshot",
)  # fmt: skip
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


class Codex(Reader):
    """Implements `Reader`. What the model wrote in a row is the answer of one call."""

    name = "Codex rollouts"
    note = (
        "Codex's rollouts have no tools and often no system prompt; a gateway between Codex and the model records all "
        "of it"
    )

    def __init__(self) -> None:
        self._conversation: Conversation | None = None
        self._history: list[int] = []
        self._answer: list[Dict] = []
        self._tokens: int | None = None

    @staticmethod
    def recognizes(line: Line) -> bool:
        value = line.value
        if value.get("type") in _KINDS and isinstance(value.get("payload"), dict):
            return True
        # The first versions wrote bare items behind a line about the session.
        return (
            value.get("record_type") == "state"
            or (
                value.get("type") in _ITEMS
                and bool({"role", "call_id", "summary"} & value.keys())
                and "uuid" not in value
            )
            or ({"id", "timestamp", "instructions"} <= value.keys() and "type" not in value)
        )

    def take(self, line: Line) -> Iterator[Session]:
        payload = as_object(line.value.get("payload")) or line.value
        kind = line.value.get("type") if "payload" in line.value else "response_item"
        if kind == "session_meta" or ("instructions" in line.value and "type" not in line.value):
            yield from self.end()
            self._conversation = Conversation(str(payload.get("id") or line.path.name))
            base = payload.get("base_instructions")
            text = payload.get("instructions") or (base.get("text") if isinstance(base, dict) else base)
            if isinstance(text, str) and text:
                self._history.append(self._conversation.add({"role": "system", "content": text}))
            return
        conversation = self._conversation = self._conversation or Conversation(line.path.name)
        if kind == "event_msg" and payload.get("type") == "token_count":
            usage = as_object(as_object(payload.get("info")).get("last_token_usage"))
            self._tokens = prompt_tokens_of(usage) or self._tokens
            self._close()
        elif kind == "compacted":
            self._close()
            kept = as_objects(payload.get("replacement_history"))
            text = payload.get("message")
            items = kept or [{"role": "user", "content": text if isinstance(text, str) else ""}]
            roots = [index for index in self._history if conversation.pool[index].get("role") == "system"]
            self._history = [*roots, *(conversation.add(message) for message in to_messages(items))]
        elif kind == "response_item":
            self._item(conversation, payload)

    def _item(self, conversation: Conversation, item: Dict) -> None:
        is_input = item.get("type") in _OUTPUTS or item.get("role") not in (None, "assistant")
        if not is_input:
            self._answer.append(item)
            return
        self._close()
        if (message := to_message(item)) is not None:
            self._history.append(conversation.add(message))

    def _close(self) -> None:
        """The call whose answer ends here."""
        if self._conversation is not None and (messages := to_messages(self._answer)):
            answer = self._conversation.add(messages[0])
            self._conversation.call(self._history, answer, prompt_tokens=self._tokens)
            self._history.append(answer)
            self._tokens = None
        self._answer = []

    def end(self) -> Iterator[Session]:
        """The session so far."""
        self._close()
        if self._conversation is not None and self._conversation.specs:
            yield self._conversation.session("codex")
        self._conversation, self._history, self._tokens = None, [], None
