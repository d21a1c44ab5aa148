"""Reads the prompt and the namespace of a request from its body, for routers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from pic_traces.encode.chat_template import load_chat_template
from pic_traces.encode.template_encoder import TemplateEncoder
from pic_traces.encode.tokenizer import TextEncoder, load_tokenizer
from pic_traces.errors import TraceError
from pic_traces.session import Call, JsonValue, Message

from sglang_pic.core import Tokens, as_tokens
from sglang_pic.route.sketch import Sketched, cut
from sglang_pic.route.wire import Cutting, namespace_bytes

# Cache of tokenized texts.
_CACHED_BYTES: Final = 1 << 28

_OTHER_LANES: Final = ("mode", "preset", "edit")


class Body(msgspec.Struct, frozen=True):
    """The fields of chat completions, completions and `/generate` that shape the prompt or its namespace."""

    messages: list[Message] | None = None
    prompt: str | list[int] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    tools: list[JsonValue] | None = None
    tool_choice: JsonValue = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    model: str | None = None
    lora_path: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    custom_params: dict[str, JsonValue] | None = None
    sampling_params: dict[str, JsonValue] | None = None

    def namespace(self, salt: str | None) -> bytes | None:
        """The canonical bytes of the namespace; None if servers do not announce the request's lane or adapter.

        Args:
            salt: the header that replaces `cache_salt`.
        """
        inner = (self.sampling_params or {}).get("custom_params")
        params = self.custom_params or (inner if isinstance(inner, dict) else {})
        options = params.get("pic")
        asks = isinstance(options, dict) and any(options.get(key, "auto") != "auto" for key in _OTHER_LANES)
        if asks or self.lora_path or ":" in (self.model or ""):
            return None
        return namespace_bytes(self.extra_key, salt or self.cache_salt)


class Prompts:
    """Makes sketches of requests. Not thread-safe.

    Args:
        tokenizer: folder with the servers' `tokenizer.json` and chat template; None to route token ids only.
        salt: the secret that servers and router share.

    Raises:
        TraceError: the tokenizer or its template cannot be read.
    """

    def __init__(self, tokenizer: str | None, salt: bytes) -> None:
        self._salt = salt
        """The secret."""
        self._texts: TextEncoder | None = None
        if tokenizer is not None:
            folder = Path(tokenizer).expanduser()
            self._texts = TextEncoder(load_tokenizer(folder), _CACHED_BYTES)
            self._chats = TemplateEncoder(tokenizer, self._texts, load_chat_template(folder))

    def sketch(self, data: bytes, cutting: Cutting, salt: str | None = None) -> Sketched | None:
        """The sketch of a request's prompt for servers with `cutting`; None if its tokens or namespace are unknown.

        Cost: tokenizing new text, and about 50 ns a token.
        """
        try:
            body = msgspec.json.decode(data, type=Body)
            namespace, tokens = body.namespace(salt), self._tokens(body)
        except (ValueError, OverflowError, RecursionError, TraceError):
            # The server will report the error, or prompts of this kind are not routed by their text.
            return None
        if namespace is None or tokens is None or not len(tokens):
            return None
        return cut(tokens, namespace, self._salt, chunker=cutting.chunker, delimiters=frozenset(cutting.delimiters))

    def _tokens(self, body: Body) -> Tokens | None:
        ids = body.input_ids or (body.prompt if isinstance(body.prompt, list) else None)
        if ids is not None:
            return as_tokens(ids)
        if self._texts is None:
            return None
        text = body.text if body.text is not None else body.prompt
        if isinstance(text, str):
            return as_tokens(np.concatenate([[], *(each.ids for each in self._texts.tokenize(text))]))
        if body.messages is None:
            return None
        options: dict[str, JsonValue] = {
            "tool_choice": body.tool_choice,
            "chat_template_kwargs": body.chat_template_kwargs,
        }
        call = Call(
            session_id="",
            index=0,
            messages=body.messages,
            completion=None,
            tools=body.tools,
            agent=None,
            options=options,
        )
        return self._chats.encode(call).tokens
