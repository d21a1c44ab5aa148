"""Reference of `splice_mha`: gather, rotate, scatter, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..rope_params import RopeParams
from .rotate import rotate

__all__ = ["splice_mha"]


def splice_mha(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
) -> None:
    """See `pic_kernels.splice_mha`; operands are not checked here."""
    for k_buffer, v_buffer in zip(k_buffers, v_buffers, strict=True):
        # FP8 tensors cannot be indexed everywhere; their bytes can.
        k_bits, v_bits = (
            buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer for buffer in (k_buffer, v_buffer)
        )
        v_bits[dst] = v_bits[src]
        rows = k_bits[src].view(k_buffer.dtype)
        rows[..., : rope.rotary_dim] = rotate(rows[..., : rope.rotary_dim].contiguous(), shifts, rope)
        k_bits[dst] = rows.view(k_bits.dtype)
