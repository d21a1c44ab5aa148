"""Reference of `splice_mha`: keys as `splice_mla` moves rows with no latent, values copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layers import Source
from ..rope_params import RopeParams
from .splice_mla import splice_mla


def splice_mha(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
    *,
    source: Source | None = None,
) -> None:
    """See `pic_kernels.splice_mha`; operands are not checked here."""
    splice_mla(k_buffers, src, dst, shifts, rope, rope_offset=0, source=source and source.turned)
    for buffer, held in zip(v_buffers, (source and source.copied) or v_buffers, strict=True):
        bits, held_bits = (each.view(torch.uint8) if each.element_size() == 1 else each for each in (buffer, held))
        bits[dst] = held_bits[src]
