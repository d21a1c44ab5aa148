"""Fused gather-rotate-scatter over the KV rows of all layers, each op beside a plain reference.

Raw tensors in and out; imports torch, and triton once a fused kernel runs. Two switches are for debugging:
`SGLANG_PIC_KERNELS=reference` (or `eager`, `triton`) chooses the implementation; with
`SGLANG_PIC_CHECK_SLOTS=1` a device asserts the slots of every splice.
"""

from __future__ import annotations

from .backend import Backend, Choice
from .layers import LayerBuffers, Source
from .rope_params import RopeParams
from .splice_index import choose_index, splice_index
from .splice_rows import choose_rows, splice_rows

__all__ = [
    "Backend",
    "Choice",
    "LayerBuffers",
    "RopeParams",
    "Source",
    "choose_index",
    "choose_rows",
    "splice_index",
    "splice_rows",
]
