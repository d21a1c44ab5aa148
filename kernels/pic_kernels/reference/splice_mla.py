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
) -> None:
    """See `pic_kernels.splice_mla`; operands are not checked here."""
    rotary = slice(rope_offset, rope_offset + rope.rotary_dim)
    for buffer in buffers:
        # FP8 tensors cannot be indexed everywhere; their bytes can.
        bits = buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer
        rows = bits[src].view(buffer.dtype)
        rows[..., rotary] = rotate(rows[..., rotary].contiguous(), shifts, rope)
        bits[dst] = rows.view(bits.dtype)
