"""Gather-rotate-scatter in torch on any device, without waiting for it.

Serves CPUs, and operands on an accelerator that the fused kernel does not cover. Angles and the mask of unmoved tokens
are formed once per call; then every layer is one gather, a few element-wise ops and one scatter, queued on the current
stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layers import LayerBuffers, Source
from .rope_params import RopeParams

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def splice_rows(
    keys: LayerBuffers,
    values: LayerBuffers | None,
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
    *,
    rope_offset: int = 0,
    source: Source | None = None,
) -> None:
    """See `pic_kernels.splice_rows`; reads no value on the host."""
    source = source or Source(keys, values)
    for buffer, held in zip(values or (), source.values or (), strict=True):
        word = _BITS[buffer.element_size()]
        buffer.view(word).index_copy_(0, dst, held.view(word).index_select(0, src))
    cos, sin = (table.unsqueeze(1) for table in rope.cos_sin(shifts))  # [n, 1, rotary_dim / 2]
    still = (shifts == 0).view(-1, 1, 1)
    for buffer, held in zip(keys, source.keys, strict=True):
        bits = buffer.view(_BITS[buffer.element_size()])
        rows = held.view(bits.dtype).index_select(0, src)
        part = rows.narrow(2, rope_offset, rope.rotary_dim)
        result = _rotate_pairs(part.view(buffer.dtype).to(torch.float32), cos, sin, rope)
        if buffer.dtype == torch.float8_e4m3fn:
            limit = torch.finfo(buffer.dtype).max
            result.clamp_(-limit, limit)
        # NOTE: arithmetic with cos = 1 and sin = 0 is not a bit-exact copy (signed zeros, infinities).
        part.copy_(torch.where(still, part, result.to(buffer.dtype).view(bits.dtype)))
        bits.index_copy_(0, dst, rows)


def _rotate_pairs(rows32: Tensor, cos: Tensor, sin: Tensor, rope: RopeParams) -> Tensor:
    """`rows32` `[n, heads, rotary_dim]` float32, rotated, as a new contiguous tensor."""
    out = torch.empty_like(rows32, memory_format=torch.contiguous_format)
    half = rope.rotary_dim // 2
    first, second = (slice(half), slice(half, None)) if rope.is_neox_style else (slice(0, None, 2), slice(1, None, 2))
    a, b = rows32[..., first], rows32[..., second]
    torch.mul(a, cos, out=out[..., first]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out[..., second]).addcmul_(a, sin)
    return out
