"""Splice of multi-head latent attention's KV: the latent is copied, its rotary slice turned.

For every layer and token `i`, with `R(s)` the rotation by `s` positions and `o` the rotary offset:

    row[dst[i]] = row[src[i]]        row[dst[i]][o : o + rotary_dim] = R(shifts[i]) row[src[i]][o : o + rotary_dim]
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import eager, host, reference
from .backend import Backend, select_backend
from .operands import check_buffers, check_indices, check_rope, check_slots
from .rope_params import RopeParams

__all__ = ["splice_mla"]


def splice_mla(
    buffers: Sequence[Tensor],
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
    *,
    rope_offset: int,
) -> None:
    """Copy latent rows between slots of a pool, the rotary slice turned by each token's shift; in place.

    The promises are those of `splice_mha`: float32 arithmetic, one rounding, shift 0 and everything beside the
    rotary slice bit for bit, slots checked on a CPU and the caller's promise on a device.

    Args:
        buffers: per layer `[num_slots, 1, kv_lora_rank + rope_dim]`, contiguous, one shape, dtype and device;
            written in place.
        src: `[n]` int64 slots to read.
        dst: `[n]` int64 slots to write: each once, none of them in `src`.
        shifts: `[n]` int32 or int64, target position minus source position.
        rope: the layers' rotation, on the buffers' device.
        rope_offset: first dimension of the rotary slice (`kv_lora_rank`).

    Raises:
        TypeError: a dtype outside the contract.
        ValueError: shapes, devices or slots outside the contract; nothing has been written.
    """
    check_buffers("buffers", buffers)
    num_slots, _, row_dim = buffers[0].shape
    device = buffers[0].device
    check_indices(src, dst, shifts, device)
    check_rope(rope, rope_offset, row_dim, device)
    if not src.numel():
        return
    if device.type == "cpu":
        check_slots(src, dst, num_slots)
    backend = select_backend(device)
    if backend is Backend.REFERENCE:
        reference.splice_mla(buffers, src, dst, shifts, rope, rope_offset=rope_offset)
        return
    path = host if backend is Backend.HOST else eager
    path.rotate_rows(buffers, src, dst, shifts, rope, offset=rope_offset)
