"""`splice_mla` as one Triton launch: the latent copied, its rotary slice turned, all layers.

    row[dst[i]] = row[src[i]]        row[dst[i]][o : o + rotary_dim] = R(shifts[i]) row[src[i]][o : o + rotary_dim]

Owns the kernel and its launch. Whoever calls has checked the operands and asked the gate. Imports triton.
"""

# mypy: disable-error-code=no-untyped-def
# NOTE: what a kernel takes has no type of Python's; Triton infers it.

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from .layers import LayerBuffers
from .rope_params import RopeParams
from .triton_code import compile_ahead
from .triton_rows import (
    COPY_BLOCK,
    FLOATS,
    IS_INTERPRETED,
    LAUNCH_OPTIONS,
    LAYER_BLOCK,
    ROTARY_BLOCK,
    copy_units,
    num_blocks,
    on_device,
    rotary_unit_pairs,
    rotate_units,
    unit_bytes,
)

__all__ = ["Constants", "compile_for", "constants", "splice_mla"]


class Constants(NamedTuple):
    """What the kernel is compiled for, in the order of its parameters."""

    heads: int
    dim: int
    offset: int
    rotary_dim: int
    is_neox: bool
    float_dtype: tl.dtype
    unit_pairs: int
    rest_unit_bytes: int
    """Unit of what is beside the rotary slice: the latent."""
    interpreted: bool = IS_INTERPRETED
    rotary_block: int = ROTARY_BLOCK
    copy_block: int = COPY_BLOCK
    layer_block: int = LAYER_BLOCK


@lru_cache(maxsize=64)
def constants(heads: int, dim: int, offset: int, rotary_dim: int, is_neox: bool, dtype: torch.dtype) -> Constants:
    """The constants of rows `[heads, dim]` of `dtype`."""
    size = dtype.itemsize
    return Constants(
        heads=heads,
        dim=dim,
        offset=offset,
        rotary_dim=rotary_dim,
        is_neox=is_neox,
        float_dtype=FLOATS[dtype],
        unit_pairs=rotary_unit_pairs(dim, offset, rotary_dim, dtype, is_neox=is_neox),
        rest_unit_bytes=unit_bytes(dim * size, offset * size, rotary_dim * size),
    )


def splice_mla(
    buffers: LayerBuffers, src: Tensor, dst: Tensor, shifts: Tensor, rope: RopeParams, *, rope_offset: int
) -> None:
    """See `pic_kernels.splice_mla`; one launch on the current stream, nothing is read back."""
    _, heads, dim = buffers[0].shape
    const = constants(heads, dim, rope_offset, rope.rotary_dim, rope.is_neox_style, buffers.dtype)
    n, layers = src.numel(), len(buffers)
    rest_bytes = buffers.row_bytes // dim * (dim - const.rotary_dim)
    blocks = num_blocks(n, heads * (const.rotary_dim // 2) // const.unit_pairs, const.rotary_block) + num_blocks(
        n, rest_bytes // const.rest_unit_bytes, const.copy_block
    )
    with on_device(src.device):
        _splice_mla_kernel[(blocks, -(-layers // const.layer_block))](
            buffers.addresses,
            src.contiguous(),
            dst.contiguous(),
            shifts.contiguous(),
            rope.turns,
            n,
            layers,
            *const,
            **LAUNCH_OPTIONS,
        )


def compile_for(const: Constants, target: GPUTarget) -> CompiledKernel:
    """The kernel as its launches on `target` compile it; no device is needed."""
    return compile_ahead(_splice_mla_kernel, const, target)


@triton.jit(do_not_specialize=["num_tokens", "num_layers"], do_not_specialize_on_alignment=["src", "dst", "shifts"])
def _splice_mla_kernel(
    table,
    src,
    dst,
    shifts,
    turns,
    num_tokens,
    num_layers,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    OFFSET: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    FLOAT: tl.constexpr,
    UNIT_PAIRS: tl.constexpr,
    REST_UNIT_BYTES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
    LAYER_BLOCK: tl.constexpr,
):
    """Blocks of the first axis, for all tokens: [rotary slice | the rest of the row]."""
    ITEM_BYTES: tl.constexpr = FLOAT.primitive_bitwidth // 8
    ROTARY_UNITS: tl.constexpr = HEADS * (ROTARY_DIM // 2) // UNIT_PAIRS
    tokens = num_tokens.to(tl.int64)
    slots = (src, dst, tokens, num_layers)
    rotary_blocks = (tokens * ROTARY_UNITS + ROTARY_BLOCK - 1) // ROTARY_BLOCK
    block = tl.program_id(0).to(tl.int64)
    if block < rotary_blocks:
        rotate_units(
            table,
            slots,
            shifts,
            turns,
            block,
            HEADS,
            DIM,
            OFFSET,
            ROTARY_DIM,
            IS_NEOX,
            FLOAT,
            UNIT_PAIRS,
            INTERPRETED,
            ROTARY_BLOCK,
            LAYER_BLOCK,
        )
    elif DIM > ROTARY_DIM:
        copy_units(
            table,
            slots,
            block - rotary_blocks,
            HEADS,
            DIM * ITEM_BYTES,
            OFFSET * ITEM_BYTES,
            ROTARY_DIM * ITEM_BYTES,
            REST_UNIT_BYTES,
            COPY_BLOCK,
            LAYER_BLOCK,
        )
