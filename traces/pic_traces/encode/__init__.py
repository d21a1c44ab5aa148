"""Recorded calls as token ids, by a model's own tokenizer and chat template or by a stand-in that needs no files."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pic_traces.encode.chat_template import load_chat_template
from pic_traces.encode.encoded import EncodedCall, Encoder, Part, Tokens
from pic_traces.encode.standin import StandInEncoder
from pic_traces.encode.template_encoder import TemplateEncoder
from pic_traces.encode.tokenizer import TextEncoder, load_tokenizer
from pic_traces.errors import TraceError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

__all__ = ["EncodedCall", "Encoder", "Part", "Tokens", "load_encoder", "model_folder"]


def load_encoder(tokenizer: str | None) -> Encoder:
    """The encoder of a tokenizer folder, or one that needs no files.

    Args:
        tokenizer: a folder with `tokenizer.json`, `tokenizer_config.json` and a chat template (in that file or as
            `chat_template.jinja`), as a model's, or the path of such a `tokenizer.json`; or the name of a model on the
            hub that Hugging Face's cache has (nothing is downloaded); None for an approximate stand-in.

    Raises:
        TraceError: a file or a package is missing, or the tokenizer or the template cannot be read.
    """
    if tokenizer is None:
        return StandInEncoder()
    folder = model_folder(tokenizer)
    return TemplateEncoder(tokenizer, TextEncoder(load_tokenizer(folder)), load_chat_template(folder))


def model_folder(tokenizer: str) -> Path:
    """The folder that `load_encoder` reads for this name.

    Raises:
        TraceError: there is none.
    """
    folder = Path(tokenizer).expanduser()
    if folder.name == "tokenizer.json":
        folder = folder.parent
    return folder if folder.is_dir() else _cached(tokenizer)


def _cached(name: str) -> Path:
    """The folder of a hub's model in the local cache of Hugging Face."""
    if not _HUB_NAME.fullmatch(name):
        raise TraceError(
            f"tokenizer={name!r}: no such folder; a folder with a tokenizer.json is expected, or a model's name on the "
            "hub"
        )
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    folder = cache / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    found = [folder / "snapshots" / main.read_text().strip()] if main.is_file() else []
    found += sorted(folder.glob("snapshots/*"))
    for snapshot in found:
        if (snapshot / "tokenizer.json").is_file():
            return snapshot
    raise TraceError(
        f"tokenizer={name!r}: no such folder, and not in {cache}; nothing is downloaded here: "
        f"`hf download {name} --include '*.json' '*.jinja'` puts its tokenizer there, or name a folder with its files"
    )
