"""`splice_mha` as one Triton launch: keys turned, values copied, all layers.

    V[dst[i]] = V[src[i]]        K[dst[i]] = R(shifts[i]) K[src[i]]   on the first `rotary_dim` dimensions

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
    ACCESS_BYTES,
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

__all__ = ["Constants", "compile_for", "constants", "splice_mha"]


class Constants(NamedTuple):
    """What the kernel is compiled for, in the order of its parameters."""

    heads: int
    head_dim: int
    rotary_dim: int
    is_neox: bool
    float_dtype: tl.dtype
    unit_pairs: int
    rest_unit_bytes: int
    """Unit of the keys behind the rotary part."""
    v_row_bytes: int
    interpreted: bool = IS_INTERPRETED
    rotary_block: int = ROTARY_BLOCK
    copy_block: int = COPY_BLOCK
    layer_block: int = LAYER_BLOCK


@lru_cache(maxsize=64)
def constants(
    heads: int, head_dim: int, v_row_bytes: int, rotary_dim: int, is_neox: bool, dtype: torch.dtype
) -> Constants:
    """The constants of keys `[heads, head_dim]` of `dtype` and values of `v_row_bytes`, a multiple of 16, a row."""
    return Constants(
        heads=heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        is_neox=is_neox,
        float_dtype=FLOATS[dtype],
        unit_pairs=rotary_unit_pairs(head_dim, 0, rotary_dim, dtype, is_neox=is_neox),
        rest_unit_bytes=unit_bytes(head_dim * dtype.itemsize, rotary_dim * dtype.itemsize),
        v_row_bytes=v_row_bytes,
    )


def splice_mha(
    k_buffers: LayerBuffers, v_buffers: LayerBuffers, src: Tensor, dst: Tensor, shifts: Tensor, rope: RopeParams
) -> None:
    """See `pic_kernels.splice_mha`; one launch on the current stream, nothing is read back."""
    _, heads, head_dim = k_buffers[0].shape
    const = constants(heads, head_dim, v_buffers.row_bytes, rope.rotary_dim, rope.is_neox_style, k_buffers.dtype)
    n, layers = src.numel(), len(k_buffers)
    rest_bytes = k_buffers.row_bytes // head_dim * (head_dim - const.rotary_dim)
    blocks = (
        num_blocks(n, heads * (const.rotary_dim // 2) // const.unit_pairs, const.rotary_block)
        + num_blocks(n, rest_bytes // const.rest_unit_bytes, const.copy_block)
        + num_blocks(n, const.v_row_bytes // ACCESS_BYTES, const.copy_block)
    )
    with on_device(src.device):
        _splice_mha_kernel[(blocks, -(-layers // const.layer_block))](
            k_buffers.addresses,
            v_buffers.addresses,
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
    return compile_ahead(_splice_mha_kernel, const, target)


@triton.jit(do_not_specialize=["num_tokens", "num_layers"], do_not_specialize_on_alignment=["src", "dst", "shifts"])
def _splice_mha_kernel(
    k_table,
    v_table,
    src,
    dst,
    shifts,
    turns,
    num_tokens,
    num_layers,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    FLOAT: tl.constexpr,
    UNIT_PAIRS: tl.constexpr,
    REST_UNIT_BYTES: tl.constexpr,
    V_ROW_BYTES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
    LAYER_BLOCK: tl.constexpr,
):
    """Blocks of the first axis, for all tokens: [keys' rotary part | rest of the keys | values]."""
    ITEM_BYTES: tl.constexpr = FLOAT.primitive_bitwidth // 8
    HEAD_BYTES: tl.constexpr = HEAD_DIM * ITEM_BYTES
    TURNED_BYTES: tl.constexpr = ROTARY_DIM * ITEM_BYTES
    ROTARY_UNITS: tl.constexpr = HEADS * (ROTARY_DIM // 2) // UNIT_PAIRS
    REST_UNITS: tl.constexpr = HEADS * (HEAD_BYTES - TURNED_BYTES) // REST_UNIT_BYTES
    tokens = num_tokens.to(tl.int64)
    slots = (src, dst, tokens, num_layers)
    rotary_blocks = (tokens * ROTARY_UNITS + ROTARY_BLOCK - 1) // ROTARY_BLOCK
    rest_blocks = (tokens * REST_UNITS + COPY_BLOCK - 1) // COPY_BLOCK
    block = tl.program_id(0).to(tl.int64)
    copied = block - rotary_blocks
    if block < rotary_blocks:
        rotate_units(
            k_table,
            slots,
            shifts,
            turns,
            block,
            HEADS,
            HEAD_DIM,
            0,
            ROTARY_DIM,
            IS_NEOX,
            FLOAT,
            UNIT_PAIRS,
            INTERPRETED,
            ROTARY_BLOCK,
            LAYER_BLOCK,
        )
    elif copied < rest_blocks:
        if REST_UNITS > 0:
            copy_units(
                k_table, slots, copied, HEADS, HEAD_BYTES, 0, TURNED_BYTES, REST_UNIT_BYTES, COPY_BLOCK, LAYER_BLOCK
            )
    else:
        copied -= rest_blocks
        copy_units(v_table, slots, copied, 1, V_ROW_BYTES, 0, 0, 16, COPY_BLOCK, LAYER_BLOCK)
