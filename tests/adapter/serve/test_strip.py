"""Where a server looks for known nonces: the first message if it is a system prompt, and prompts in plain text."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_pic.adapter.serve import strip
from sglang_pic.config import CONFIG_VARIABLE

MANAGER = SimpleNamespace(served_model_name="m", server_args=SimpleNamespace(enable_metrics=False))
SERVING = SimpleNamespace(tokenizer_manager=MANAGER)
HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"


@pytest.fixture(autouse=True)
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(CONFIG_VARIABLE, '{"strip": ["claude-code-billing"]}')
    strip._names.cache_clear()
    yield
    strip._names.cache_clear()


def served(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that SGLang renders."""
    request = ChatCompletionRequest(model="m", messages=[*messages])
    strip._render(lambda *_: SimpleNamespace(prompt="", prompt_ids=[5]), SERVING, request, False)
    return [{"role": one.role, "content": one.model_dump()["content"]} for one in request.messages]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


USER = {"role": "user", "content": HEADER}


@pytest.mark.parametrize(
    ("sent", "left"),
    [
        (f"{HEADER}\nYou help.", "You help."),
        (parts(HEADER, "You help."), parts("You help.")),
        (f"You help. {HEADER}", "You help. "),
        ("You help.", "You help."),
        ("x-anthropic-billing-header is a header.", "x-anthropic-billing-header is a header."),
        (300 * "a" + f" {HEADER}", 300 * "a" + f" {HEADER}"),
    ],
    ids=["text", "parts", "after words", "none", "named", "far away"],
)
def test_a_system_prompt_loses_the_header_alone(sent: Any, left: Any) -> None:
    for role in ("system", "developer"):
        assert served({"role": role, "content": sent}, USER) == [{"role": role, "content": left}, USER]


def test_a_system_prompt_that_is_the_header_is_not_there_and_other_messages_stay() -> None:
    for content in (HEADER, parts(HEADER)):
        assert served({"role": "system", "content": content}, USER) == [USER]
    assert served(USER) == [USER]


def test_texts_lose_it_and_token_ids_stay() -> None:
    for sent, left in ((f"<s>{HEADER}\nYou help.", "<s>You help."), ([HEADER + "a", "b"], ["a", "b"]), (None, None)):
        obj = SimpleNamespace(text=sent, input_ids=[5])
        strip.strip_text(MANAGER, obj)
        assert (obj.text, obj.input_ids) == (left, [5])


def test_a_chat_that_reaches_the_engine_as_text_loses_nothing_more() -> None:
    """Models of images get chats as text: what users wrote is not looked at."""
    chat = f"<system>You help.<user>{HEADER}"
    request = ChatCompletionRequest(model="m", messages=[{"role": "system", "content": "You help."}, USER])
    for name in ("prompt", "prompt_ids"):
        rendered = SimpleNamespace(**{"prompt": "", "prompt_ids": [5]} | {name: chat})
        obj = SimpleNamespace(text=getattr(strip._render(lambda *_, it=rendered: it, SERVING, request, True), name))
        strip.strip_text(MANAGER, obj)
        assert obj.text == chat
        assert type(obj.text) is str


def test_without_the_setting_nothing_is_stripped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, "{}")
    strip._names.cache_clear()
    obj = SimpleNamespace(text=HEADER)
    strip.strip_text(MANAGER, obj)
    assert obj.text == HEADER
