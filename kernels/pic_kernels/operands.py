"""The contract of a splice's operands, checked in one place for every implementation.

Owns the checks; they read metadata only, except `check_slots`, which reads slot ids and is therefore for CPU
tensors. Breaking the contract raises `TypeError` or `ValueError`; nothing is written before every check passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from .rope_params import RopeParams

__all__ = ["SUPPORTED_DTYPES", "check_buffers", "check_indices", "check_rope", "check_slots"]

SUPPORTED_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
"""The dtypes of KV rows that can be rotated."""


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


def check_slots(src: Tensor, dst: Tensor, num_slots: int) -> None:
    """Slots exist, no target is written twice and none is also a source. Cost O(n + num_slots); CPU tensors.

    Raises:
        ValueError: a slot is outside `[0, num_slots)`, repeated in `dst`, or in both `src` and `dst`.
    """
    if not src.numel():
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
