"""Reference of `splice_mha`: keys as `splice_mla` moves rows with no latent, values copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..rope_params import RopeParams
from .splice_mla import splice_mla


def splice_mha(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
) -> None:
    """See `pic_kernels.splice_mha`; operands are not checked here."""
    splice_mla(k_buffers, src, dst, shifts, rope, rope_offset=0)
    for buffer in v_buffers:
        bits = buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer
        bits[dst] = bits[src]
