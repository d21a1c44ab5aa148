"""The contract of a splice's operands, checked in one place for every implementation.

Owns the checks and the switch `SGLANG_PIC_CHECK_SLOTS`. They read metadata only, except those of the slots: on a CPU
`check_slots` reads them, on a device `assert_slots` has the device do so, without a word back. Breaking the contract
raises `TypeError` or `ValueError`; nothing is written before every check passed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from . import host_native
from .rope_params import RopeParams

__all__ = [
    "SUPPORTED_DTYPES",
    "assert_slots",
    "check_buffers",
    "check_indices",
    "check_rope",
    "check_slots",
    "guard_slots",
]

SUPPORTED_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
"""The dtypes of KV rows that can be rotated."""

_SWITCH: Final = "SGLANG_PIC_CHECK_SLOTS"


def check_buffers(name: str, buffers: Sequence[Tensor]) -> None:
    """Every buffer is `[num_slots, heads, dim]`, contiguous, and like the first one."""
    if not buffers:
        raise ValueError(f"{name} is empty: pass one buffer per layer.")
    first = buffers[0]
    if first.dtype not in SUPPORTED_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
        raise TypeError(f"{name}[0].dtype={first.dtype!r}: must be one of {allowed}.")
    for layer, buffer in enumerate(buffers):
        if buffer.dim() != 3 or not buffer.is_contiguous():
            raise ValueError(
                f"{name}[{layer}] has shape {tuple(buffer.shape)!r} and strides {buffer.stride()!r}: "
                "must be contiguous [num_slots, heads, dim]."
            )
        if buffer.shape != first.shape or buffer.dtype != first.dtype or buffer.device != first.device:
            raise ValueError(
                f"{name}[{layer}] is {tuple(buffer.shape)!r} {buffer.dtype} on {buffer.device}: "
                f"must be like {name}[0], {tuple(first.shape)!r} {first.dtype} on {first.device}."
            )


def check_indices(src: Tensor, dst: Tensor, shifts: Tensor, device: torch.device) -> None:
    """`src`, `dst` are int64 `[n]` and `shifts` int32 or int64 `[n]`, all on `device`."""
    for name, index, dtypes in (
        ("src", src, (torch.int64,)),
        ("dst", dst, (torch.int64,)),
        ("shifts", shifts, (torch.int32, torch.int64)),
    ):
        if index.dtype not in dtypes:
            raise TypeError(f"{name}.dtype={index.dtype!r}: must be {' or '.join(map(str, dtypes))}.")
        if index.dim() != 1 or index.shape != src.shape:
            raise ValueError(
                f"{name}.shape={tuple(index.shape)!r}: src, dst and shifts must be [n] with one n; "
                f"src.shape={tuple(src.shape)!r}."
            )
        if index.device != device:
            raise ValueError(f"{name}.device={index.device!r}: must be the buffers' device {device!r}.")


def check_rope(rope: RopeParams, offset: int, dim: int, device: torch.device) -> None:
    """The rotary part `[offset, offset + rotary_dim)` lies inside a row of `dim` and `rope` on `device`."""
    if offset < 0 or offset + rope.rotary_dim > dim:
        raise ValueError(
            f"rotary part [{offset!r}, {offset + rope.rotary_dim!r}) must lie inside a row of {dim!r} dimensions."
        )
    if rope.inv_freq.device != device:
        raise ValueError(f"inv_freq.device={rope.inv_freq.device!r}: must be {device!r}; use RopeParams.to().")


def guard_slots(src: Tensor, dst: Tensor, num_slots: int) -> None:
    """`check_slots` on a CPU; on a device `assert_slots` if `SGLANG_PIC_CHECK_SLOTS=1`, else nothing."""
    if src.device.type == "cpu":
        check_slots(src, dst, num_slots)
        return
    switch = os.environ.get(_SWITCH, "0")
    if switch not in ("0", "1"):
        raise ValueError(f"{_SWITCH}={switch!r}: must be 0 or 1; 1 has the device assert the slots of every splice.")
    if switch == "1":
        assert_slots(src, dst, num_slots)


def assert_slots(src: Tensor, dst: Tensor, num_slots: int) -> None:
    """`check_slots` queued on the current stream before the splice: a few small kernels, no wait.

    A broken promise stops the device there, before a row is written: the splice never runs, and the process finds
    a device-side assertion at its next synchronisation. For debugging; on a CPU it raises at once.

    Raises:
        RuntimeError: what `check_slots` refuses, on a CPU.
    """
    low, high = torch.minimum(src.amin(), dst.amin()), torch.maximum(src.amax(), dst.amax())
    # NOTE: private, but the one assertion that torch queues rather than waits for.
    torch._assert_async((low >= 0) & (high < num_slots), "splice: a slot is out of bounds")
    times = torch.zeros(num_slots, dtype=torch.int32, device=dst.device)
    times.index_add_(0, dst.clamp(0, num_slots - 1), torch.ones_like(dst, dtype=torch.int32))
    torch._assert_async(times.amax() <= 1, "splice: dst names a slot twice")
    torch._assert_async(
        times.index_select(0, src.clamp(0, num_slots - 1)).amax() == 0, "splice: src and dst share a slot"
    )


def check_slots(src: Tensor, dst: Tensor, num_slots: int) -> None:
    """Slots exist, no target is written twice and none is also a source. Cost O(n + num_slots); CPU tensors.

    Raises:
        ValueError: a slot is outside `[0, num_slots)`, repeated in `dst`, or in both `src` and `dst`.
    """
    if not src.numel():
        return
    native = host_native.load()
    if native is not None and native.slots_hold(src, dst, num_slots):
        return
    for name, index in (("src", src), ("dst", dst)):
        low, high = (int(bound) for bound in index.aminmax())
        if low < 0 or high >= num_slots:
            raise ValueError(f"{name} holds slots in [{low}, {high}]: must be in [0, {num_slots}).")
    written = torch.zeros(num_slots, dtype=torch.bool)
    written[dst] = True
    if int(written.sum()) != dst.numel():
        raise ValueError("dst names a slot twice: every target slot must be written once.")
    shared = src[written[src]]
    if shared.numel():
        raise ValueError(
            f"src and dst share {shared.numel()} slots, e.g. {int(shared[0])!r}: a splice must not read what it writes."
        )
