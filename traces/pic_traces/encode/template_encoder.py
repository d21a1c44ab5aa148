"""An encoder with a model's own tokenizer and chat template; small conversations tell what the template can show."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pic_traces.encode.chat_template import ChatTemplate, TemplateRefusal
from pic_traces.encode.encoded import EncodedCall, Mark
from pic_traces.encode.locate import Shape, locate
from pic_traces.encode.prepare import ContentForm, Preparation, content_text, recorded_roles
from pic_traces.encode.tokenizer import TextEncoder
from pic_traces.errors import LineError
from pic_traces.flatten import shows_tools, uses_tools
from pic_traces.session import Call, JsonValue, Message

# Words that no template writes itself.
_QUESTION, _ANSWER = "zebra crossing", "umbrella stand"


class TemplateEncoder:
    """Implements `Encoder` with a model's own ids.

    They are what transformers' `apply_chat_template` gives for the same messages, put as SGLang puts them: content
    parts joined, arguments of tool calls parsed, None as empty text. Where the template does not show tool schemas,
    calls and results, all calls have them as plain text, as the replay sends them.
    """

    is_exact = True

    def __init__(self, name: str, tokenizer: TextEncoder, template: ChatTemplate) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._template = template
        self._preparation = Preparation(_content_form(template))
        keep = Preparation(ContentForm.TEXT).keep_tools
        self._shows_tools = shows_tools(lambda probe: _render(template, keep(probe.messages), probe.tools))
        self._shape = _shape(template, tokenizer.added_tokens)
        special = tokenizer.special_ids
        written = {token_id for token, token_id in special.items() if token in template.source}
        self.delimiters = frozenset(written or special.values())
        self._any_flattened = False

    @property
    def texts(self) -> Sequence[str]:
        """Those of the tokenizer's vocabulary."""
        return self._tokenizer.texts

    @property
    def notes(self) -> tuple[str, ...]:
        """How the calls so far differ from what a server would be sent, for reports; empty if they do not."""
        flattened = "tools are in the prompts as plain text: the chat template does not show them"
        return (*((flattened,) if self._any_flattened else ()), *self._preparation.notes())

    def encode(self, call: Call) -> EncodedCall:
        """The ids of one call.

        Raises:
            LineError: the template refuses the messages.
        """
        messages = self._prepare(call.messages, call.tools)
        tools, options = self._conversation_options(call)
        try:
            text = self._template.render(messages, tools, options, add_generation_prompt=True)
        except TemplateRefusal as error:
            raise LineError(
                f"session {call.session_id!r}, call {call.index}",
                f"the chat template of {self.name} refuses its messages: {error}; use another tokenizer, or none for "
                "approximate counts",
            ) from error
        prompt = list(self._tokenizer.tokenize(text))
        answer = self._answer_text(call, messages, text)
        last = prompt[-1] if prompt else None
        shape = self._shape

        def marks() -> list[Mark]:
            contents = [content_text(message.get("content")) for message in messages]
            return locate(text, contents, recorded_roles(call.messages, messages), shape)

        return EncodedCall(prompt, list(self._tokenizer.tokenize_after(last, answer)), marks)

    def _prepare(self, messages: list[Message], tools: list[JsonValue] | None) -> list[Message]:
        if self._shows_tools:
            return self._preparation.keep_tools(messages)
        self._any_flattened |= uses_tools(messages, tools)
        return self._preparation.flatten(messages, tools)

    def _conversation_options(self, call: Call) -> tuple[list[JsonValue] | None, dict[str, JsonValue]]:
        options = call.options.get("chat_template_kwargs")
        tools = call.tools if self._shows_tools and call.options.get("tool_choice") != "none" else None
        return tools or None, options if isinstance(options, dict) else {}

    def _answer_text(self, call: Call, messages: list[Message], prompt: str) -> str:
        """What the model went on with after `prompt`, up to the token that ended its turn."""
        if call.completion is None:
            return ""
        (answer,) = self._prepare([call.completion], None)
        tools, options = self._conversation_options(call)
        text = _render(self._template, [*messages, answer], tools, options, add_generation_prompt=False) or ""
        if not text.startswith(prompt):
            (plain,) = self._preparation.flatten([call.completion], None)
            return content_text(plain["content"])
        answer_text = text[len(prompt) :]
        end_of_turn = self._shape.end_of_turn
        if end_of_turn is None or end_of_turn not in answer_text:
            return answer_text.rstrip("\n")
        return answer_text[: answer_text.rfind(end_of_turn) + len(end_of_turn)]


def _content_form(template: ChatTemplate) -> ContentForm:
    """Whether the template shows the texts of a list of parts, and not the list itself."""
    parts: JsonValue = [{"type": "text", "text": text} for text in (_QUESTION, _ANSWER)]
    text = _render(template, [{"role": "user", "content": parts}]) or ""
    is_shown = _QUESTION in text and _ANSWER in text and not re.search(r"""['"]type['"]""", text)
    return ContentForm.PARTS if is_shown else ContentForm.TEXT


def _shape(template: ChatTemplate, added: re.Pattern[str] | None) -> Shape:
    """The template's own text around messages.

    Args:
        added: finds the tokenizer's added tokens.
    """
    question: Message = {"role": "user", "content": _QUESTION}
    answer: Message = {"role": "assistant", "content": _ANSWER}
    bare = _render(template, [question], add_generation_prompt=False)
    asked = _render(template, [question])
    answered = _render(template, [question, answer], add_generation_prompt=False)
    behind = (answered or "").partition(_ANSWER)[2]
    closing = added.search(behind) if added is not None else None
    return Shape(
        added=added,
        # Gemma's blank lines are added tokens, which close nothing.
        end_of_turn=(closing.group().strip() or None) if closing else None,
        generation_prompt=asked[len(bare) :] if bare and asked and asked.startswith(bare) else "",
    )


def _render(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[JsonValue] | None = None,
    options: dict[str, JsonValue] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str | None:
    """The text of a conversation; None where the template refuses it."""
    try:
        return template.render(messages, tools, options or {}, add_generation_prompt=add_generation_prompt)
    except TemplateRefusal:
        return None
