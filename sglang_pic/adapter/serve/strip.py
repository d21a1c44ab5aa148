"""Removes known nonces from prompts before they are tokenized, where the configuration names them in `strip`.

A request is served as if it had come without them. Of chats the first message is looked at if it is a system prompt, of
prompts in plain text all of it; token ids stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

from sglang_pic.adapter.metrics import Metric, MetricKind, Series
from sglang_pic.adapter.sglang.hooks import hook
from sglang_pic.config import load_config
from sglang_pic.nonces import NONCES, strip

STRIPPED: Final = Metric(
    "sglang:pic_stripped_total",
    MetricKind.COUNTER,
    "Prompts from which a nonce was removed before they were tokenized, by nonce. With strip only.",
    label="nonce",
    values={name: nonce.title for name, nonce in NONCES.items()},
)
METRICS: Final = (STRIPPED,)


class RenderedChat(str):
    """The text of a chat whose system prompt has been looked at: models of images get chats as text."""


def install() -> None:
    """Register the hook on chats, in a process with an HTTP server; `strip_text` is called for other prompts."""
    if _names():
        hook(__name__, "OpenAIServingChat._process_messages", _render)


def strip_text(manager: Any, obj: Any) -> None:
    """Remove the nonces from the texts of SGLang's `GenerateReqInput`."""
    if not _names() or obj.text is None:
        return
    if isinstance(obj.text, RenderedChat):
        obj.text = str(obj.text)
    else:
        is_one = isinstance(obj.text, str)
        texts = [_strip(manager, text) for text in ([obj.text] if is_one else obj.text)]
        obj.text = texts[0] if is_one else texts


def _render(original: Callable[..., Any], serving: Any, request: Any, *args: object, **kwargs: object) -> Any:
    _strip_chat(serving.tokenizer_manager, request)
    rendered = original(serving, request, *args, **kwargs)
    # Either may be the engine's text.
    for name in ("prompt", "prompt_ids"):
        if isinstance(text := getattr(rendered, name), str):
            setattr(rendered, name, RenderedChat(text))
    return rendered


def _strip_chat(manager: Any, request: Any) -> None:
    first = request.messages[0] if request.messages else None
    if first is None or first.role not in ("system", "developer"):
        return
    if isinstance(first.content, str):
        first.content = _strip(manager, first.content)
    elif first.content:
        for part in first.content:
            if isinstance(getattr(part, "text", None), str):
                part.text = _strip(manager, part.text)
        first.content = [part for part in first.content if getattr(part, "text", None) != ""]
    # A prompt of which nothing is left is not there.
    if not first.content and len(request.messages) > 1:
        del request.messages[0]


def _strip(manager: Any, text: str) -> str:
    stripped, found = strip(text, _names())
    for name in found:
        _series(manager.served_model_name if manager.server_args.enable_metrics else None).add(STRIPPED, value=name)
    return stripped


@cache
def _names() -> tuple[str, ...]:
    return load_config().strip


@cache
def _series(model: str | None) -> Series:
    return Series(METRICS, None if model is None else {"model_name": model})
