"""Whether the fused kernel covers some operands, and if not, why.

Reads metadata only and imports triton only to look at it, so that any process can ask.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from .layers import LayerBuffers
from .rope_params import RopeParams


def refusal(keys: LayerBuffers, values: LayerBuffers | None, rope: RopeParams, offset: int) -> str:
    """Why the fused kernel does not cover these operands, in words that follow a colon; empty if it does.

    The kernel covers any number of heads, any head_dim and any rotary part that `operands` admits: its accesses
    narrow with them, down to one pair.

    Args:
        keys: rows with a rotary part.
        values: rows that are copied bit for bit, or None.
        rope: the rotation.
        offset: first dimension of the rotary part.
    """
    every = (keys,) if values is None else (keys, values)
    if reason := _device_refusal(keys.device, tuple(each.dtype for each in every)):
        return reason
    for each in every:
        if not each.is_aligned:
            return f"rows of {each.row_bytes} bytes do not start at multiples of 16 bytes in every layer"
    dim = keys[0].shape[2]
    if not rope.is_neox_style and (offset % 2 or dim % 2):
        return f"interleaved pairs start at odd dimensions: offset {offset} in rows of {dim}"
    return ""


def _device_refusal(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str:
    if not _has_triton():
        return "triton is not installed"
    if device.type == "cpu":
        from . import triton_rows

        return "" if triton_rows.IS_INTERPRETED else "CPU tensors need TRITON_INTERPRET=1 from the start of the process"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device.type!r} tensors of this build of torch are not on an NVIDIA GPU"
    needed = (8, 9) if torch.float8_e4m3fn in dtypes else (8, 0)
    if (here := _capability(device)) < needed:
        return f"{dtypes[0]} rows need compute capability {needed[0]}.{needed[1]}, this is {here[0]}.{here[1]}"
    return ""


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
