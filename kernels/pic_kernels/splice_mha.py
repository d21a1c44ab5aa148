"""Splice of multi-head and grouped-query KV: gather, rotate, scatter, all layers in one call.

For every layer and token `i`, with `R(s)` the rotation by `s` positions:

    V[dst[i]] = V[src[i]]        K[dst[i]] = R(shifts[i]) K[src[i]]   on the first `rotary_dim` dimensions
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import dispatch
from .backend import Choice
from .layers import LayerBuffers, Source
from .rope_params import RopeParams


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
    """Copy KV rows between slots of a pool, keys rotated by each token's shift; in place, all layers.

    Float32 arithmetic, every key rounded once; values and tokens with shift 0 are copied bit for bit. Bytes
    outside the rows `dst` are not touched. FP8 (e4m3) keys need no scale: a per-tensor scale cancels, and values
    that would overflow saturate.

    Args:
        k_buffers: per layer `[num_slots, num_kv_heads, head_dim]`, contiguous, one shape, dtype and device;
            written in place. With a `LayerBuffers` no call repeats the checks or builds the table of addresses.
        v_buffers: per layer `[num_slots, num_kv_heads, v_head_dim]`, likewise.
        src: `[n]` int64 slots to read.
        dst: `[n]` int64 slots to write: each once, none of them in `src`.
        shifts: `[n]` int32 or int64, target position minus source position.
        rope: the layers' rotation, on the buffers' device.
        source: rows are read from these instead, of the same layers, heads, dimensions and dtype; pinned host memory
            will do for buffers on a device.

    On a CPU the slots are checked. On a device the caller promises that they are disjoint and in bounds, because
    reading them would stall the stream on which the work is queued; `SGLANG_PIC_CHECK_SLOTS=1` has the device check.

    Raises:
        TypeError: a dtype outside the contract.
        ValueError: shapes, devices or slots outside the contract; nothing has been written.
    """
    keys, values = LayerBuffers.of("k_buffers", k_buffers), LayerBuffers.of("v_buffers", v_buffers)
    if len(values) != len(keys) or values[0].shape[:2] != keys[0].shape[:2] or values.device != keys.device:
        raise ValueError(
            f"v_buffers: {len(values)} of {tuple(values[0].shape)!r} on {values.device} beside {len(keys)} k_buffers "
            f"of {tuple(keys[0].shape)!r} on {keys.device}: layers, slots, heads and device must agree."
        )
    dispatch.move_rows(keys, values, src, dst, shifts, rope, 0, source)


def choose_mha(k_buffers: LayerBuffers, v_buffers: LayerBuffers, rope: RopeParams) -> Choice:
    """The implementation that `splice_mha` takes for these operands, and why it is not the fused kernel.

    Raises:
        ValueError: `SGLANG_PIC_KERNELS` names no implementation, or one that does not cover the operands.
    """
    return dispatch.choose(k_buffers, v_buffers, rope, 0)
