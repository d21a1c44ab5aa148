"""Prompts put together from a system prompt, skills and a question, as OpenAI messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Message = Mapping[str, Any]
"""One OpenAI message: `role`, `content` and whatever else the endpoint takes."""

NEAR: Final[Mapping[str, Any]] = {"custom_params": {"pic": {"skills": "near"}}}
"""For `extra_body` of OpenAI's client: the request's pinned skills may be spliced near its end, too."""


def compose(system: str, skills: Sequence[str], user: str) -> list[Message]:
    """The messages of a prompt that uses skills, in this order: system prompt, skills, question.

    Each skill is a message of its own in the role `system`, as `Skills.compile` sends it. A chat template opens and
    closes messages with tokens of their own, so a skill's tokens are the same beside any other message and in any
    order. A template that takes one system message only refuses such prompts.

    Args:
        system: the system prompt; empty for none, and the template may write one of its own then.
        skills: the texts, as they were compiled.
        user: the question; empty for none.
    """
    messages: list[Message] = [{"role": "system", "content": text} for text in (system, *skills) if text]
    return [*messages, {"role": "user", "content": user}] if user else messages
