"""Reference of `splice_mla`: gather, rotate the rotary slice, scatter, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..rope_params import RopeParams
from .rotate import rotate


def splice_mla(
    buffers: Sequence[Tensor],
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
    *,
    rope_offset: int,
    source: Sequence[Tensor] | None = None,
) -> None:
    """See `pic_kernels.splice_mla`; operands are not checked here."""
    rotary = slice(rope_offset, rope_offset + rope.rotary_dim)
    for buffer, held in zip(buffers, source or buffers, strict=True):
        # FP8 tensors cannot be indexed everywhere; their bytes can.
        bits, held_bits = (each.view(torch.uint8) if each.element_size() == 1 else each for each in (buffer, held))
        rows = held_bits[src].view(buffer.dtype)
        rows[..., rotary] = rotate(rows[..., rotary].contiguous(), shifts, rope)
        bits[dst] = rows.view(bits.dtype)
