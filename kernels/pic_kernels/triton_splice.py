"""`splice_rows` as one Triton launch over all layers: rotary parts are rotated, everything else is copied.

    row[dst[i]] = row[src[i]]        row[dst[i]][o : o + rotary_dim] = R(shifts[i]) row[src[i]][o : o + rotary_dim]

Keys and latent rows are rotated; values, where a pool has them, are copied. The caller has checked the operands
and asked `coverage`. Imports triton.
"""

# mypy: disable-error-code=no-untyped-def
# NOTE: Triton infers the types of a kernel's parameters; Python has none for them.

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layers import LayerBuffers, Source
from .rope_params import RopeParams
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


class Constants(NamedTuple):
    """The compile-time parameters of the kernel, in its order."""

    heads: int
    dim: int
    offset: int
    rotary_dim: int
    is_neox: bool
    float_dtype: tl.dtype
    unit_pairs: int
    rest_unit_bytes: int
    """Unit of the keys beside their rotary part."""
    value_row_bytes: int
    """0 where there are no values."""
    interpreted: bool = IS_INTERPRETED
    rotary_block: int = ROTARY_BLOCK
    copy_block: int = COPY_BLOCK
    layer_block: int = LAYER_BLOCK


@lru_cache(maxsize=64)
def constants(
    heads: int, dim: int, offset: int, rotary_dim: int, is_neox: bool, dtype: torch.dtype, value_row_bytes: int = 0
) -> Constants:
    """The constants for rows `[heads, dim]` of `dtype`, and rows of `value_row_bytes`, a multiple of 16, beside."""
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
        value_row_bytes=value_row_bytes,
    )


def splice_rows(
    keys: LayerBuffers,
    values: LayerBuffers | None,
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
    *,
    rope_offset: int = 0,
    source: Source | None = None,
) -> None:
    """See `pic_kernels.splice_rows`; one launch on the current stream, nothing is read back."""
    _, heads, dim = keys[0].shape
    value_bytes = 0 if values is None else values.row_bytes
    const = constants(heads, dim, rope_offset, rope.rotary_dim, rope.is_neox_style, keys.dtype, value_bytes)
    n, layers = src.numel(), len(keys)
    rest_bytes = keys.row_bytes // dim * (dim - const.rotary_dim)
    blocks = (
        num_blocks(n, heads * (const.rotary_dim // 2) // const.unit_pairs, const.rotary_block)
        + num_blocks(n, rest_bytes // const.rest_unit_bytes, const.copy_block)
        + num_blocks(n, value_bytes // ACCESS_BYTES, const.copy_block)
    )
    held = source or Source(keys, values)
    with on_device(src.device):
        _splice_kernel[(blocks, -(-layers // const.layer_block))](
            held.keys.addresses_on(keys.device),
            (held.values or held.keys).addresses_on(keys.device),
            keys.addresses,
            (values or keys).addresses,
            src.contiguous(),
            dst.contiguous(),
            shifts.contiguous(),
            rope.turns,
            n,
            layers,
            *const,
            **LAUNCH_OPTIONS,
        )


@triton.jit(do_not_specialize=["num_tokens", "num_layers"], do_not_specialize_on_alignment=["src", "dst", "shifts"])
def _splice_kernel(
    keys_from_table,
    values_from_table,
    keys_table,
    values_table,
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
    VALUE_ROW_BYTES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
    LAYER_BLOCK: tl.constexpr,
):
    """Blocks of the first axis, for all tokens: [rotary parts | rest of the keys | values]."""
    ITEM_BYTES: tl.constexpr = FLOAT.primitive_bitwidth // 8
    ROTARY_UNITS: tl.constexpr = HEADS * (ROTARY_DIM // 2) // UNIT_PAIRS
    REST_UNITS: tl.constexpr = HEADS * (DIM - ROTARY_DIM) * ITEM_BYTES // REST_UNIT_BYTES
    tokens = num_tokens.to(tl.int64)
    slots = (src, dst, tokens, num_layers)
    rotary_blocks = (tokens * ROTARY_UNITS + ROTARY_BLOCK - 1) // ROTARY_BLOCK
    rest_blocks = (tokens * REST_UNITS + COPY_BLOCK - 1) // COPY_BLOCK
    block = tl.program_id(0).to(tl.int64)
    rest = block - rotary_blocks
    if block < rotary_blocks:
        rotate_units(
            (keys_from_table, keys_table), slots, shifts, turns, block,
            HEADS, DIM, OFFSET, ROTARY_DIM, IS_NEOX, FLOAT, UNIT_PAIRS, INTERPRETED, ROTARY_BLOCK, LAYER_BLOCK,
        )  # fmt: skip
    elif rest < rest_blocks:
        if REST_UNITS > 0:
            copy_units(
                (keys_from_table, keys_table), slots, rest, HEADS, DIM * ITEM_BYTES, OFFSET * ITEM_BYTES,
                ROTARY_DIM * ITEM_BYTES,
                REST_UNIT_BYTES, COPY_BLOCK, LAYER_BLOCK,
            )  # fmt: skip
    elif VALUE_ROW_BYTES > 0:
        copy_units(
            (values_from_table, values_table), slots, rest - rest_blocks, 1, VALUE_ROW_BYTES, 0, 0, 16,
            COPY_BLOCK, LAYER_BLOCK,
        )  # fmt: skip
