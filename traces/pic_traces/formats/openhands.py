"""OpenHands: events of a session, of the first agent (`action`, `observation`) and of the SDK (`kind`).

A file is one event, a list of them, or a row of an evaluation with `history`. Calls that OpenHands logged itself
(`llm_completions`) are chat requests and need no reader of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import cast

from pic_traces.formats.bodies import as_object, as_objects, prompt_tokens_of
from pic_traces.formats.reader import Conversation, Dict, Reader
from pic_traces.lines import Line
from pic_traces.session import JsonValue, Message, Session

_KINDS = (
    "SystemPromptEvent", "MessageEvent", "ActionEvent", "ObservationEvent", "AgentErrorEvent", "Condensation",
    "UserRejectObservation", "ConversationStateUpdateEvent", "PauseEvent", "CondensationSummaryEvent",
)  # fmt: skip


class OpenHands(Reader):
    """Implements `Reader`. The events of a folder's files are one session; condensed events leave the later prompts."""

    name = "OpenHands events"
    is_per_file = False

    def __init__(self) -> None:
        self._events: dict[str, list[Dict]] = {}

    @staticmethod
    def recognizes(line: Line) -> bool:
        history = as_objects(line.value.get("history"))
        return _is_event(line.value) or bool(history and any(map(_is_event, history)))

    def take(self, line: Line) -> Iterator[Session]:
        if _is_event(line.value):
            # A file of its own for every event, or one of all.
            name = line.path.parent.name if line.place == "" else line.path.name
            self._events.setdefault(name, []).append(line.value)
            return
        yield from _sessions(as_objects(line.value["history"]), str(line.value.get("instance_id") or line.path.name))

    def end(self) -> Iterator[Session]:
        """The events that stood in files one by one."""
        for name, events in self._events.items():
            if all(isinstance(event.get("id"), int) for event in events):
                events.sort(key=lambda event: cast("int", event["id"]))
            yield from _sessions(events, name)


def _is_event(value: Dict) -> bool:
    if value.get("kind") in _KINDS:
        return True
    return "source" in value and ("action" in value or "observation" in value) and "id" in value


def _sessions(events: list[Dict], name: str) -> Iterator[Session]:
    conversation = Conversation(name)
    tools: list[JsonValue] | None = None
    history: list[tuple[JsonValue, int]] = []
    answers: dict[str, int] = {}
    for event in events:
        if found := as_objects(event.get("tools") or as_object(event.get("args")).get("tools")):
            tools = [*found]
        if event.get("kind") == "Condensation":
            forgotten = event.get("forgotten_event_ids")
            history = [one for one in history if not (isinstance(forgotten, list) and one[0] in forgotten)]
            if summary := event.get("summary"):
                history.append((event.get("id"), conversation.add({"role": "user", "content": summary})))
            continue
        response, usage, message = _answer(event)
        if message is None:
            if (sent := _sent(event)) is not None:
                history.append((event.get("id"), conversation.add(sent)))
        elif response in answers:
            # One response made several events, each with a call of its own.
            pool, index = conversation.pool, answers[response]
            known = as_objects(pool[index].get("tool_calls"))
            calls = [call for call in as_objects(message.get("tool_calls")) if call not in known]
            pool[index] = {**pool[index], "tool_calls": [*known, *calls]}
        else:
            index = conversation.add(message)
            conversation.call([one for _, one in history], index, tools=tools, prompt_tokens=usage)
            history.append((event.get("id"), index))
            answers[response] = index
    if conversation.specs:
        yield conversation.session("openhands")


def _answer(event: Dict) -> tuple[str, int | None, Message | None]:
    """The id of the response that an event is of, its prompt's tokens, and its message; no message if it is of none."""
    name = str(event.get("llm_response_id") or event.get("id"))
    if event.get("kind") == "ActionEvent":
        call = as_object(event.get("tool_call"))
        function = as_object(call.get("function")) or call
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        made: JsonValue = {
            "id": event.get("tool_call_id"),
            "type": "function",
            "function": {"name": event.get("tool_name"), "arguments": text},
        }
        message: Message = {"role": "assistant", "content": _text(event.get("thought")), "tool_calls": [made]}
        if thought := event.get("reasoning_content"):
            message["reasoning_content"] = thought
        return name, None, message
    if event.get("kind") == "MessageEvent" and event.get("source") == "agent":
        return name, None, {"role": "assistant", "content": _text(as_object(event.get("llm_message")).get("content"))}
    response = as_object(as_object(event.get("tool_call_metadata")).get("model_response"))
    if "action" in event and response:
        choice = next(iter(as_objects(response.get("choices"))), {})
        return (
            str(response.get("id")),
            prompt_tokens_of(response),
            {"role": "assistant", **as_object(choice.get("message"))},
        )
    if event.get("action") == "message" and event.get("source") == "agent":
        return name, None, {"role": "assistant", "content": _text(as_object(event.get("args")).get("content"))}
    return name, None, None


def _sent(event: Dict) -> Message | None:
    """What an event adds to the prompt; None if nothing."""
    kind, args = event.get("kind"), as_object(event.get("args"))
    if kind == "SystemPromptEvent" or event.get("action") == "system":
        text = as_object(event.get("system_prompt")).get("text") or event.get("system_prompt") or args.get("content")
        return {"role": "system", "content": text}
    if kind == "MessageEvent" or event.get("action") == "message":
        return {
            "role": "user",
            "content": _text(as_object(event.get("llm_message")).get("content") or args.get("content")),
        }
    if kind is None and "observation" in event:
        call, text = as_object(event.get("tool_call_metadata")).get("tool_call_id"), _text(event.get("content"))
        if call is not None or text:
            return (
                {"role": "tool", "tool_call_id": call, "content": text} if call else {"role": "user", "content": text}
            )
    if kind in ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation"):
        seen = as_object(event.get("observation"))
        text = _text(seen.get("content") or seen.get("output") or event.get("error") or event.get("rejection_reason"))
        return {"role": "tool", "tool_call_id": event.get("tool_call_id"), "content": text}
    return None


def _text(content: JsonValue) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in as_objects(content))
    return content if isinstance(content, str) else ""
