"""The references: one file per op, same name and signature, plain torch, readable first."""

from __future__ import annotations

from torch import Tensor

from ..layers import LayerBuffers, Source
from ..rope_params import RopeParams
from .splice_index import splice_index
from .splice_mha import splice_mha
from .splice_mla import splice_mla

__all__ = ["move_rows", "splice_index", "splice_mha", "splice_mla"]


def move_rows(
    turned: LayerBuffers,
    copied: LayerBuffers | None,
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
    offset: int,
    source: Source | None = None,
) -> None:
    """See `pic_kernels.dispatch.move_rows`: the op whose operands these are."""
    if copied is None:
        splice_mla(turned, src, dst, shifts, rope, rope_offset=offset, source=source and source.turned)
    else:
        splice_mha(turned, copied, src, dst, shifts, rope, source=source)
