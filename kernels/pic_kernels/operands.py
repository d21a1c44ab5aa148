"""The contract of a splice's operands, checked in one place for every implementation; values of slots are in `slots`.

The checks read metadata only. They raise `TypeError` or `ValueError` before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from .rope_params import RopeParams

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


def check_source(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    """Rows of `source` are rows of `target`, layer by layer."""
    if len(source) != len(target) or source[0].shape[1:] != target[0].shape[1:] or source[0].dtype != target[0].dtype:
        raise ValueError(
            f"source: {len(source)} layers of {tuple(source[0].shape[1:])!r} {source[0].dtype} for {len(target)} of "
            f"{tuple(target[0].shape[1:])!r} {target[0].dtype}: layers, heads, dimensions and dtype must agree."
        )
    if source[0].device not in (target[0].device, torch.device("cpu")):
        raise ValueError(f"source is on {source[0].device}: must be on {target[0].device} or in host memory.")
