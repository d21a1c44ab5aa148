"""Reference of `splice_rows`: gather, rotate the rotary slice, scatter, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layers import Source
from ..rope_params import RopeParams
from .rotate import rotate


def splice_rows(
    keys: Sequence[Tensor],
    values: Sequence[Tensor] | None,
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
    *,
    rope_offset: int = 0,
    source: Source | None = None,
) -> None:
    """See `pic_kernels.splice_rows`; operands are not checked here."""
    rotary = slice(rope_offset, rope_offset + rope.rotary_dim)
    for buffer, held in zip(keys, source.keys if source else keys, strict=True):
        rows = _bits(held)[src].view(buffer.dtype)
        rows[..., rotary] = rotate(rows[..., rotary].contiguous(), shifts, rope)
        _bits(buffer)[dst] = _bits(rows)
    for buffer, held in zip(values or (), (source and source.values) or values or (), strict=True):
        _bits(buffer)[dst] = _bits(held)[src]


def _bits(rows: Tensor) -> Tensor:
    """FP8 tensors cannot be indexed everywhere; their bytes can."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows
