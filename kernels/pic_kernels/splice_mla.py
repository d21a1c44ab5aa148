"""Splice of multi-head latent attention's KV: the latent is copied, its rotary slice rotated.

For every layer and token `i`, with `R(s)` the rotation by `s` positions and `o` the rotary offset:

    row[dst[i]] = row[src[i]]        row[dst[i]][o : o + rotary_dim] = R(shifts[i]) row[src[i]][o : o + rotary_dim]
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import dispatch
from .backend import Choice
from .layers import LayerBuffers, Source
from .rope_params import RopeParams


def splice_mla(
    buffers: Sequence[Tensor],
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
    *,
    rope_offset: int,
    source: Source | None = None,
) -> None:
    """Copy latent rows between slots of a pool, the rotary slice rotated by each token's shift; in place.

    The promises are those of `splice_mha`: float32 arithmetic, one rounding, shift 0 and everything beside the
    rotary slice bit for bit, slots checked on a CPU and the caller's promise on a device.

    Args:
        buffers: per layer `[num_slots, 1, kv_lora_rank + rope_dim]`, contiguous, one shape, dtype and device;
            written in place. With a `LayerBuffers` no call repeats the checks or builds the table of addresses.
        src: `[n]` int64 slots to read.
        dst: `[n]` int64 slots to write: each once, none of them in `src`.
        shifts: `[n]` int32 or int64, target position minus source position.
        rope: the layers' rotation, on the buffers' device.
        rope_offset: first dimension of the rotary slice (`kv_lora_rank`).
        source: rows are read from these instead, of the same layers, heads, dimensions and dtype; pinned host memory
            will do for buffers on a device.

    Raises:
        TypeError: a dtype outside the contract.
        ValueError: shapes, devices or slots outside the contract; nothing has been written.
    """
    dispatch.move_rows(LayerBuffers.of("buffers", buffers), None, src, dst, shifts, rope, rope_offset, source)


def choose_mla(buffers: LayerBuffers, rope: RopeParams, *, rope_offset: int) -> Choice:
    """The implementation that `splice_mla` takes for these operands, and why it is not the fused kernel.

    Raises:
        ValueError: `SGLANG_PIC_KERNELS` names no implementation, or one that does not cover the operands.
    """
    return dispatch.choose(buffers, None, rope, rope_offset)
