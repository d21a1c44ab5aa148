"""Recorded calls as token ids, by a model's own tokenizer and chat template or by a stand-in that needs no files.

`load_encoder` gives an `Encoder`. Knows neither torch nor transformers nor SGLang.
"""

from __future__ import annotations

from pic_traces.encode.encoded import EncodedCall, Encoder, Part, Tokens
from pic_traces.encode.load import load_encoder

__all__ = ["EncodedCall", "Encoder", "Part", "Tokens", "load_encoder"]
