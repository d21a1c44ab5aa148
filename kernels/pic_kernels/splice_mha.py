"""Splice of multi-head and grouped-query KV: gather, rotate, scatter, all layers in one call.

For every layer and token `i`, with `R(s)` the rotation by `s` positions:

    V[dst[i]] = V[src[i]]        K[dst[i]] = R(shifts[i]) K[src[i]]   on the first `rotary_dim` dimensions
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import eager, host, reference
from .backend import Backend, select_backend
from .operands import check_buffers, check_indices, check_rope, check_slots
from .rope_params import RopeParams

__all__ = ["splice_mha"]


def splice_mha(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
) -> None:
    """Copy KV rows between slots of a pool, keys turned by each token's shift; in place, all layers.

    Float32 arithmetic, every key rounded once; values and tokens with shift 0 are copied bit for bit. Bytes
    outside the rows `dst` are not touched. FP8 (e4m3) keys need no scale: a per-tensor scale cancels, and what
    would overflow saturates.

    Args:
        k_buffers: per layer `[num_slots, num_kv_heads, head_dim]`, contiguous, one shape, dtype and device;
            written in place.
        v_buffers: per layer `[num_slots, num_kv_heads, v_head_dim]`, likewise.
        src: `[n]` int64 slots to read.
        dst: `[n]` int64 slots to write: each once, none of them in `src`.
        shifts: `[n]` int32 or int64, target position minus source position.
        rope: the layers' rotation, on the buffers' device.

    On a CPU the slots are checked; on a device, where that would stall the stream, disjointness and bounds are
    the caller's promise and the work is queued on the current stream.

    Raises:
        TypeError: a dtype outside the contract.
        ValueError: shapes, devices or slots outside the contract; nothing has been written.
    """
    check_buffers("k_buffers", k_buffers)
    check_buffers("v_buffers", v_buffers)
    num_slots, num_heads, head_dim = k_buffers[0].shape
    device = k_buffers[0].device
    if len(v_buffers) != len(k_buffers) or v_buffers[0].shape[:2] != (num_slots, num_heads):
        raise ValueError(
            f"v_buffers: {len(v_buffers)} of {tuple(v_buffers[0].shape)!r} beside {len(k_buffers)} k_buffers of "
            f"{tuple(k_buffers[0].shape)!r}: layers, slots and heads must agree."
        )
    check_indices(src, dst, shifts, device)
    check_rope(rope, 0, head_dim, device)
    if not src.numel():
        return
    if device.type == "cpu":
        check_slots(src, dst, num_slots)
    backend = select_backend(device)
    if backend is Backend.REFERENCE:
        reference.splice_mha(k_buffers, v_buffers, src, dst, shifts, rope)
        return
    path = host if backend is Backend.HOST else eager
    path.copy_rows(v_buffers, src, dst)
    path.rotate_rows(k_buffers, src, dst, shifts, rope, offset=0)
