"""What a chat template can show and how it closes a message, found out by rendering small conversations."""

from __future__ import annotations

import re

from pic_traces.encode.chat_template import ChatTemplate, TemplateRefusal
from pic_traces.encode.locate import Shape
from pic_traces.encode.prepare import ContentForm, Preparation
from pic_traces.flatten import probe_pairs
from pic_traces.session import JsonValue, Message

__all__ = ["probe_content_form", "probe_shape", "probe_tools"]

# Words that no template writes itself.
_QUESTION, _ANSWER = "zebra crossing", "umbrella stand"


def probe_tools(template: ChatTemplate) -> bool:
    """Whether tool schemas, calls and results come out in the text."""
    preparation = Preparation(ContentForm.TEXT)
    for pair in probe_pairs():
        texts = [_render(template, preparation.keep_tools(probe.messages), probe.tools) for probe in pair]
        if None in texts or texts[0] == texts[1]:
            return False
    return True


def probe_content_form(template: ChatTemplate) -> ContentForm:
    """Whether the template shows the texts of a list of parts, and not the list itself."""
    parts: JsonValue = [{"type": "text", "text": text} for text in (_QUESTION, _ANSWER)]
    text = _render(template, [{"role": "user", "content": parts}], None) or ""
    is_shown = _QUESTION in text and _ANSWER in text and not re.search(r"""['"]type['"]""", text)
    return ContentForm.PARTS if is_shown else ContentForm.TEXT


def probe_shape(template: ChatTemplate, added: re.Pattern[str] | None) -> Shape:
    """The template's own text around messages.

    Args:
        added: finds the tokenizer's added tokens.
    """
    question: Message = {"role": "user", "content": _QUESTION}
    answer: Message = {"role": "assistant", "content": _ANSWER}
    bare = _render(template, [question], None, add_generation_prompt=False)
    asked = _render(template, [question], None)
    answered = _render(template, [question, answer], None, add_generation_prompt=False)
    behind = (answered or "").partition(_ANSWER)[2]
    closing = added.search(behind) if added is not None else None
    return Shape(
        added=added,
        end_of_turn=closing.group().strip() if closing else None,
        generation_prompt=asked[len(bare) :] if bare and asked and asked.startswith(bare) else "",
    )


def _render(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[JsonValue] | None,
    *,
    add_generation_prompt: bool = True,
) -> str | None:
    try:
        return template.render(messages, tools, {}, add_generation_prompt=add_generation_prompt)
    except TemplateRefusal:
        return None
