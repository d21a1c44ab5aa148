"""OpenAI chat completions: one request body a line, bare or in a logger's envelope, with or without its answer."""

from __future__ import annotations

from collections.abc import Iterator

from pic_traces.formats import anthropic, parts
from pic_traces.formats.bodies import (
    TRACED,
    as_list,
    as_object,
    as_objects,
    brief,
    find_answer,
    find_body,
    is_message,
    is_other_span,
    mark_of,
    prompt_tokens_of,
    session_of,
    was_refused,
)
from pic_traces.formats.reader import Dict, Reader, Request
from pic_traces.formats.stream import joined
from pic_traces.formats.times import time_of
from pic_traces.lines import Line
from pic_traces.session import JsonValue, Message, as_type

# Besides messages and tools, what the server's chat template may see. Sampling is the replay's business.
_PROMPT_OPTIONS = ("tool_choice", "chat_template_kwargs")
# Where bodies have their messages and tools: OpenAI's and Anthropic's, Gemini's, loggers'.
_MESSAGES = ("messages", "contents", "prompt", "input", "inputs")
_TOOLS = ("tools", "toolConfig", "functions", "available_tools", "tool_definitions")
# Where loggers put tools that they took out of the body.
_PARAMETERS = (
    "model_parameters", "optional_params", "invocation_params", "parameters", "params", "kwargs", "args", "config",
    "metadata", "extra",
)  # fmt: skip


class Chat(Reader):
    """Implements `Reader`."""

    name = "chat requests (`messages`)"

    @staticmethod
    def recognizes(line: Line) -> bool:
        return not is_other_span(line.value) and find_body(line.value, chat_body) is not None

    def take(self, line: Line) -> Iterator[Request]:
        if found := find_body(line.value, chat_body):
            yield request_of(line._replace(value=found.around), found.body, find_answer(found.around))


def chat_body(value: Dict) -> Dict | None:
    """An object as a chat body, with `messages`, whatever it calls them; None if it is none."""
    for key in _MESSAGES:
        found = as_list(value.get(key))
        found = as_list(found[0]) if found and isinstance(found[0], list) else found
        if found and all(map(parts.is_message, found)) and not (key == "input" and _is_responses(value, found)):
            return {**value, "messages": found}
    return value if "messages" in value else None


def _is_responses(value: Dict, items: list[JsonValue]) -> bool:
    """Whether `input` is the Responses API's, not a tracer's name for messages."""
    is_chat = any(
        one.get("role") == "tool" or "tool_calls" in one or parts.is_foreign(one) for one in as_objects(items)
    )
    return not is_chat and not TRACED & value.keys()


def request_of(line: Line, body: Dict, answer: JsonValue) -> Request:
    """A chat request of any API, told apart by content.

    Args:
        line: where it stands, with what is around it.
        body: as it was sent.
        answer: as it was recorded, in whatever form.

    Raises:
        LineError: it has no messages, or something is not what the API says.
    """
    answer = joined(answer)
    messages = messages_of(line, body.get("messages"))
    # Langfuse's handler of LangChain appends the tools as messages.
    declared = [message["content"] for message in messages if _is_tool(message)]
    messages = [message for message in messages if not _is_tool(message)] if declared else messages
    tools = declared or tools_of(line, body)
    options = {key: body[key] for key in _PROMPT_OPTIONS if body.get(key) is not None}
    if any(map(parts.is_foreign, messages)):
        system = first_text(body, "system", "systemInstruction", "system_instruction", "system_prompt")
        messages, tools = [*system, *parts.to_messages(messages)], parts.to_tools(tools)
    elif anthropic.is_anthropic(body):
        messages, tools = anthropic.to_messages(body), parts.to_tools(tools)
        options = {"tool_choice": "none"} if as_object(body.get("tool_choice")).get("type") == "none" else {}
    elif tools:
        tools = parts.to_tools(tools) or tools
    return Request(
        messages=messages,
        answer=answer_of(line, answer),
        tools=tools,
        options=options,
        session=session_of(line.value, body) or _chat_of(body),
        prompt_tokens=prompt_tokens_of(answer, line.value),
        body=body,
        at=time_of(line.value, answer),
        mark=mark_of(line.value),
        is_refused=was_refused(line.value, line.value.get("response"), answer),
    )


def _is_tool(message: Message) -> bool:
    content = message.get("content")
    return message.get("role") == "tool" and isinstance(content, dict) and "function" in content


def _chat_of(body: Dict) -> str | None:
    """The id of a chat of the AI SDK, whose messages have parts."""
    return str(body["id"]) if "id" in body and "parts" in as_objects(body["messages"])[-1] else None


def first_text(body: Dict, *keys: str) -> list[Message]:
    """The system prompt that stands beside the messages, as a message; empty if there is none."""
    found = next((body[key] for key in keys if body.get(key)), None)
    found = as_object(found).get("parts", as_list(found) or found)
    texts = [found] if isinstance(found, str) else [one.get("text", one.get("content")) for one in as_objects(found)]
    text = "\n".join(text for text in texts if isinstance(text, str) and text)
    return [{"role": "system", "content": text}] if text else []


def messages_of(line: Line, messages: JsonValue) -> list[Message]:
    """The messages of a request, checked.

    Raises:
        LineError: there are none, or one has no role.
    """
    if not isinstance(messages, list) or not messages:
        raise line.error(f"no chat request: messages is {brief(messages)}; a non-empty list of messages is expected")
    for index, message in enumerate(messages):
        if not parts.is_message(message):
            raise line.error(f"messages[{index}] is {brief(message)}; an object with a role (string) is expected")
    return as_objects(messages)


def answer_of(line: Line, value: JsonValue) -> Message | None:
    """The recorded answer as a message: of a text, a message, or a whole response of any API; None of an error.

    Raises:
        LineError: it is none of these.
    """
    while isinstance(value, list):
        value = next((one for one in value if isinstance(one, dict | list)), None)
    if value is None or isinstance(value, str):
        return None if value is None else {"role": "assistant", "content": value}
    found = as_object(value)
    choices = [*as_objects(found.get("choices")), *as_objects(found.get("candidates"))]
    choice = min(choices, key=lambda one: as_type(one.get("index"), int) or 0, default=Dict())
    holders = (found, choice, as_object(found.get("output")))
    message = next(
        (one for holder in holders for key in ("message", "content") if (one := as_object(holder.get(key)))), found
    )
    if parts.is_message(message) and parts.is_foreign(message):
        return next(parts.to_chat(message), None)
    if isinstance(found.get("role"), str):
        return anthropic.to_answer(found) if isinstance(found.get("content"), list) else found
    if message is not found:
        # vLLM's and OpenRouter's name for it.
        thought = {"reasoning_content": message["reasoning"]} if isinstance(message.get("reasoning"), str) else {}
        return {"role": "assistant", **thought, **message}
    if isinstance(value, dict) and (not is_message(found) or "error" in found or found.get("choices") == []):
        return None
    raise line.error(
        f"the recorded answer is {brief(value)}; a string, a message or a chat completion response is expected"
    )


def tools_of(line: Line, body: Dict) -> list[JsonValue] | None:
    """The tools of a request, in the body or where loggers put them.

    Raises:
        LineError: they are no list.
    """
    holders = [body, *(as_object(line.value.get(key)) for key in _PARAMETERS)]
    holders += [as_object(holder.get(key)) for holder in holders[1:] for key in _PARAMETERS]
    tools = next((holder[key] for holder in holders for key in _TOOLS if holder.get(key)), None)
    tools = as_object(tools).get("tools", as_list(tools) or tools)
    tools = [tools] if {"functionDeclarations", "function_declarations"} & as_object(tools).keys() else tools
    if tools is not None and not isinstance(tools, list):
        raise line.error(f"tools is {type(tools).__name__}; a list of tool schemas is expected")
    return tools
