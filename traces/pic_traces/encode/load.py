"""The choice of an encoder.

Owns `load_encoder` and nothing of any encoder.
"""

from __future__ import annotations

from pic_traces.encode.encoded import Encoder
from pic_traces.encode.standin import StandInEncoder
from pic_traces.encode.template_encoder import load_template_encoder

__all__ = ["load_encoder"]


def load_encoder(tokenizer: str | None) -> Encoder:
    """The encoder of a tokenizer folder, or one that needs no files.

    Args:
        tokenizer: a folder with `tokenizer.json`, `tokenizer_config.json` and a chat template (in that file or as
            `chat_template.jinja`), as a model's; None for an approximate stand-in.

    Raises:
        TraceError: a file or a package is missing, or the tokenizer or the template cannot be read.
    """
    return StandInEncoder() if tokenizer is None else load_template_encoder(tokenizer)
