"""The capability gate of the fused kernels: do they cover these operands, and if not, why.

Owns the reasons. Reads metadata only and imports triton only to look at it, so that it can be asked anywhere.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from .layers import LayerBuffers
from .rope_params import RopeParams

__all__ = ["refusal"]


def refusal(buffers: LayerBuffers, *copied: LayerBuffers, rope: RopeParams, rope_offset: int) -> str:
    """Why the fused kernels do not cover these operands, in words that follow a colon; empty if they do.

    What `check_buffers` and `check_rope` admit is covered otherwise: any number of heads, any head_dim, any rotary
    part. The width of accesses adapts to them, down to what one pair takes.

    Args:
        buffers: whose rotary part turns.
        copied: what moves along, bit for bit.
        rope: the rotation.
        rope_offset: first dimension of the rotary part.
    """
    if reason := _device_refusal(buffers.device, (buffers.dtype, *(each.dtype for each in copied))):
        return reason
    for each in (buffers, *copied):
        if not each.is_aligned:
            return f"rows of {each.row_bytes} bytes do not start at multiples of 16 bytes in every layer"
    if not rope.is_neox_style and (rope_offset % 2 or buffers[0].shape[2] % 2):
        return f"interleaved pairs start at odd dimensions: offset {rope_offset} in rows of {buffers[0].shape[2]}"
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
