"""Recorded calls as token ids, by a model's own tokenizer and chat template or by a stand-in that needs no files."""

from __future__ import annotations

from pathlib import Path

from pic_traces.encode.chat_template import load_chat_template
from pic_traces.encode.encoded import EncodedCall, Encoder, Part, Tokens
from pic_traces.encode.standin import StandInEncoder
from pic_traces.encode.template_encoder import TemplateEncoder
from pic_traces.encode.tokenizer import TextEncoder, load_tokenizer
from pic_traces.errors import TraceError

__all__ = ["EncodedCall", "Encoder", "Part", "Tokens", "load_encoder"]


def load_encoder(tokenizer: str | None) -> Encoder:
    """The encoder of a tokenizer folder, or one that needs no files.

    Args:
        tokenizer: a folder with `tokenizer.json`, `tokenizer_config.json` and a chat template (in that file or as
            `chat_template.jinja`), as a model's; None for an approximate stand-in.

    Raises:
        TraceError: a file or a package is missing, or the tokenizer or the template cannot be read.
    """
    if tokenizer is None:
        return StandInEncoder()
    folder = Path(tokenizer).expanduser()
    if not folder.is_dir():
        raise TraceError(f"tokenizer={tokenizer!r}: no such folder; a folder with a tokenizer.json is expected")
    return TemplateEncoder(tokenizer, TextEncoder(load_tokenizer(folder)), load_chat_template(folder))
