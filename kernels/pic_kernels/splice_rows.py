"""Splice of KV rows: gather, rotate, scatter, all layers in one call.

For every layer and token `i`, with `R(s)` the rotation by `s` positions and `o` the rotary offset:

    K[dst[i]] = K[src[i]]        K[dst[i]][o : o + rotary_dim] = R(shifts[i]) K[src[i]][o : o + rotary_dim]
    V[dst[i]] = V[src[i]]        where the pool has values

Multi-head and grouped-query attention have keys and values and `o = 0`; the rows of multi-head latent attention are
keys alone: the latent, then the rotary slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from . import eager, reference
from .backend import Backend, Choice, choose_backend
from .coverage import refusal
from .layers import LayerBuffers, Source
from .operands import check_indices, check_rope, check_source
from .rope_params import RopeParams
from .slots import guard_slots


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
    """Copy KV rows between slots of a pool, keys rotated by each token's shift; in place, all layers.

    Float32 arithmetic, every rotated number rounded once; everything beside the rotary slice, and tokens with shift 0,
    are copied bit for bit. Bytes outside the rows `dst` are not touched. FP8 (e4m3) keys need no scale: a per-tensor
    scale cancels, and values that would overflow saturate.

    Args:
        keys: per layer `[num_slots, num_kv_heads, head_dim]`, or `[num_slots, 1, kv_lora_rank + rope_dim]` with latent
            attention; contiguous, one shape, dtype and device; written in place. With a `LayerBuffers` no call repeats
            the checks or builds the table of addresses.
        values: per layer `[num_slots, num_kv_heads, v_head_dim]`, likewise; None with latent attention.
        src: `[n]` int64 slots to read.
        dst: `[n]` int64 slots to write: each once, none of them in `src`.
        shifts: `[n]` int32 or int64, target position minus source position.
        rope: the layers' rotation, on the buffers' device.
        rope_offset: first dimension of the rotary slice (`kv_lora_rank`).
        source: rows are read from these instead, of the same layers, heads, dimensions and dtype; pinned host memory
            will do for buffers on a device.

    On a CPU the slots are checked. On a device the caller promises that they are disjoint and in bounds, because
    reading them would stall the stream on which the work is queued; `SGLANG_PIC_CHECK_SLOTS=1` has the device check.

    Raises:
        TypeError: a dtype outside the contract.
        ValueError: shapes, devices or slots outside the contract; nothing has been written.
    """
    keys = LayerBuffers.of("keys", keys)
    if values is not None:
        values = LayerBuffers.of("values", values)
        if len(values) != len(keys) or values[0].shape[:2] != keys[0].shape[:2] or values.device != keys.device:
            raise ValueError(
                f"values: {len(values)} of {tuple(values[0].shape)!r} on {values.device} beside {len(keys)} keys "
                f"of {tuple(keys[0].shape)!r} on {keys.device}: layers, slots, heads and device must agree."
            )
    check_indices(src, dst, shifts, keys.device)
    check_rope(rope, rope_offset, keys[0].shape[2], keys.device)
    if source is not None:
        check_source(source.keys, keys)
        if values is not None:
            check_source(source.values or (), values)
    if not src.numel():
        return
    guard_slots(src, dst, keys[0].shape[0], None if source is None else source.keys[0].shape[0])
    backend, _ = choose_rows(keys, values, rope, rope_offset=rope_offset)
    if backend is Backend.EAGER and source is not None and source.keys.device != keys.device:
        raise ValueError("rows in host memory are read by the fused kernel only, which does not cover these operands.")
    _implementation(backend).splice_rows(keys, values, src, dst, shifts, rope, rope_offset=rope_offset, source=source)


def choose_rows(keys: LayerBuffers, values: LayerBuffers | None, rope: RopeParams, *, rope_offset: int = 0) -> Choice:
    """The implementation that `splice_rows` takes for these operands, and why it is not the fused kernel.

    Raises:
        ValueError: `SGLANG_PIC_KERNELS` names no implementation, or one that does not cover the operands.
    """
    return choose_backend(keys.device, lambda: refusal(keys, values, rope, rope_offset))


def _implementation(backend: Backend) -> ModuleType:
    if backend is Backend.TRITON:
        from . import triton_splice

        return triton_splice
    return eager if backend is Backend.EAGER else reference
