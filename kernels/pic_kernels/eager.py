"""Gather-rotate-scatter in torch on any device, without waiting for it.

Owns the path for what the fused kernels do not cover on an accelerator: angles and the mask of unmoved tokens are
formed once per call, then every layer is one gather, a few element-wise ops and one scatter, queued on the current
stream. Reads no value on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .rope_params import RopeParams

__all__ = ["copy_rows", "rotate_rows"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def copy_rows(buffers: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """`buffer[dst] = buffer[src]` for every buffer, byte for byte."""
    for buffer in buffers:
        bits = buffer.view(_BITS[buffer.element_size()])
        bits.index_copy_(0, dst, bits.index_select(0, src))


def rotate_rows(
    buffers: Sequence[Tensor], src: Tensor, dst: Tensor, shifts: Tensor, rope: RopeParams, *, offset: int
) -> None:
    """`copy_rows` with the dimensions `[offset, offset + rotary_dim)` turned by each token's shift."""
    cos, sin = (table.unsqueeze(1) for table in rope.cos_sin(shifts))  # [n, 1, rotary_dim / 2]
    still = (shifts == 0).view(-1, 1, 1)
    for buffer in buffers:
        bits = buffer.view(_BITS[buffer.element_size()])
        rows = bits.index_select(0, src)
        part = rows.narrow(2, offset, rope.rotary_dim)
        turned = _turn(part.view(buffer.dtype).to(torch.float32), cos, sin, rope)
        if buffer.dtype == torch.float8_e4m3fn:
            limit = torch.finfo(buffer.dtype).max
            turned.clamp_(-limit, limit)
        # NOTE: arithmetic with cos = 1 and sin = 0 is not a bit-exact copy (signed zeros, infinities).
        part.copy_(torch.where(still, part, turned.to(buffer.dtype).view(bits.dtype)))
        bits.index_copy_(0, dst, rows)


def _turn(wide: Tensor, cos: Tensor, sin: Tensor, rope: RopeParams) -> Tensor:
    """`wide` `[n, heads, rotary_dim]` float32, turned; a new contiguous tensor."""
    out = torch.empty_like(wide, memory_format=torch.contiguous_format)
    if rope.is_neox_style:
        half = rope.rotary_dim // 2
        a, b, out_a, out_b = wide[..., :half], wide[..., half:], out[..., :half], out[..., half:]
    else:
        a, b, out_a, out_b = wide[..., 0::2], wide[..., 1::2], out[..., 0::2], out[..., 1::2]
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    return out
