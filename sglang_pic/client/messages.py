"""Composes OpenAI messages of a system prompt, skills and a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Message = Mapping[str, Any]
"""One OpenAI message: `role`, `content` and other keys of the endpoint."""

NEAR: Final[Mapping[str, Any]] = {"custom_params": {"pic": {"skills": "near"}}}
"""For `extra_body` of OpenAI's client: the request's pinned skills may be spliced near its end, too."""


def compose(system: str, skills: str | Sequence[str], user: str) -> list[Message]:
    """The messages of a prompt that uses skills, in this order: system prompt, skills, question.

    Each skill is a separate message in the role `system`, as `Skills.compile` sends it. The chat template delimits
    messages, so a skill has the same tokens beside any other message and in any order. A template that allows only one
    system message refuses such prompts.

    Args:
        system: the system prompt; if it is empty, the template may add its own.
        skills: the texts, or the only one, as they were compiled.
        user: the question; empty for none.
    """
    texts = (skills,) if isinstance(skills, str) else skills
    messages: list[Message] = [{"role": "system", "content": text} for text in (system, *texts) if text]
    return [*messages, {"role": "user", "content": user}] if user else messages
