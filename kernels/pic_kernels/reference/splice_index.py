"""Reference of `splice_index`: read, rotate and quantise the keys, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..index_pages import hadamard, place, quantise, read_keys, split_pages
from ..rope_params import RopeParams
from .rotate import rotate_pairs


def splice_index(
    pages: Sequence[Tensor],
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
    *,
    is_mixed: bool,
    source: Sequence[Tensor] | None = None,
) -> None:
    """See `pic_kernels.splice_index`; operands are not checked here."""
    cos, sin = (table.unsqueeze(1) for table in rope.cos_sin(shifts))  # [n, 1, rotary_dim / 2]
    still, here, there = shifts == 0, place(src), place(dst)
    for buffer, held in zip(pages, source or pages, strict=True):
        keys, scales = split_pages(buffer)
        held_keys, held_scales = split_pages(held)
        rows = read_keys(held, src)
        rows = hadamard(rows) if is_mixed else rows
        rotary, rest = rows[:, None, : rope.rotary_dim], rows[:, rope.rotary_dim :]
        rows = torch.cat((rotate_pairs(rotary, cos, sin, is_neox=rope.is_neox_style)[:, 0], rest), dim=1)
        moved, moved_scales = quantise(hadamard(rows) if is_mixed else rows)
        keys[there] = torch.where(still.unsqueeze(1), held_keys[here], moved.view(torch.uint8))
        scales[there] = torch.where(still, held_scales[here], moved_scales)
