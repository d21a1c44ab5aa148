"""OpenAI chat completions: one request body a line, bare or in a logger's envelope, with or without its answer."""

from __future__ import annotations

from collections.abc import Iterator

from pic_traces.formats import anthropic
from pic_traces.formats.bodies import (
    as_object,
    as_objects,
    brief,
    find_answer,
    find_body,
    is_message,
    prompt_tokens_of,
    session_of,
)
from pic_traces.formats.reader import Dict, Reader, Request
from pic_traces.formats.stream import joined
from pic_traces.lines import Line
from pic_traces.session import JsonValue, Message

# Besides messages and tools, what the server's chat template may see. Sampling is the replay's business.
_PROMPT_OPTIONS = ("tool_choice", "chat_template_kwargs")
# Where loggers put tools that they took out of the body.
_PARAMETERS = ("model_parameters", "optional_params", "invocation_params", "parameters", "params", "kwargs", "args")


class Chat(Reader):
    """Implements `Reader`."""

    name = "OpenAI chat requests (`messages`)"

    @staticmethod
    def recognizes(line: Line) -> bool:
        return find_body(line.value, _is_chat) is not None

    def take(self, line: Line) -> Iterator[Request]:
        body = find_body(line.value, _is_chat) or {}
        yield request_of(line, body, find_answer(line.value))


def request_of(line: Line, body: Dict, answer: JsonValue) -> Request:
    """A chat request of OpenAI's API or Anthropic's, told apart by content.

    Args:
        line: where it stands.
        body: as it was sent.
        answer: as it was recorded, in whatever form.

    Raises:
        LineError: it has no messages, or something is not what the API says.
    """
    answer = joined(answer)
    messages = messages_of(line, body.get("messages"))
    tools = _tools(line, body)
    options = {key: body[key] for key in _PROMPT_OPTIONS if body.get(key) is not None}
    if anthropic.is_anthropic(body):
        messages, tools = anthropic.to_messages(body), anthropic.to_tools(tools)
        options = {"tool_choice": "none"} if as_object(body.get("tool_choice")).get("type") == "none" else {}
    return Request(
        messages=messages,
        answer=answer_of(line, answer),
        tools=tools,
        options=options,
        session=session_of(line.value, body),
        prompt_tokens=prompt_tokens_of(answer, line.value),
    )


def messages_of(line: Line, messages: JsonValue) -> list[Message]:
    """The messages of a request, checked.

    Raises:
        LineError: there are none, or one has no role.
    """
    if not isinstance(messages, list) or not messages:
        raise line.error(f"no chat request: messages is {brief(messages)}; a non-empty list of messages is expected")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise line.error(f"messages[{index}] is {brief(message)}; an object with a role (string) is expected")
    return as_objects(messages)


def answer_of(line: Line, value: JsonValue) -> Message | None:
    """The recorded answer as a message: of a text, a message, or a whole response of either API; None of an error.

    Raises:
        LineError: it is none of these.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return {"role": "assistant", "content": value}
    found = as_object(value)
    if isinstance(found.get("role"), str):
        return anthropic.to_answer(found) if isinstance(found.get("content"), list) else found
    choice = next(iter(as_objects(found.get("choices"))), {})
    if message := as_object(choice.get("message")):
        # vLLM's and OpenRouter's name for it.
        thought = {"reasoning_content": message["reasoning"]} if isinstance(message.get("reasoning"), str) else {}
        return {"role": "assistant", **thought, **message}
    if isinstance(value, dict) and (not is_message(found) or "error" in found or found.get("choices") == []):
        return None
    raise line.error(
        f"the recorded answer is {brief(value)}; a string, a message or a chat completion response is expected"
    )


def _is_chat(value: Dict) -> bool:
    return "messages" in value


def _tools(line: Line, body: Dict) -> list[JsonValue] | None:
    holders = [body, *(as_object(line.value.get(key)) for key in _PARAMETERS)]
    tools = next((holder["tools"] for holder in holders if holder.get("tools")), None)
    if tools is not None and not isinstance(tools, list):
        raise line.error(f"tools is {type(tools).__name__}; a list of tool schemas is expected")
    return tools
