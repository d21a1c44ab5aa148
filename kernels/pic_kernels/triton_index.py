"""The splice of index keys as one Triton launch over all layers. Imports triton; the caller has checked the operands.

A program moves a block of tokens in one layer, a whole key to a row of the block: its scale needs all of it.
"""

# mypy: disable-error-code=no-untyped-def
# NOTE: Triton infers the types of a kernel's parameters; Python has none for them.

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from .index_pages import KEY_DIM, MIN_PEAK, PAGE_BYTES, PAGE_TOKENS, SCALES_AT
from .layers import LayerBuffers
from .rope_params import RopeParams
from .triton_rows import IS_INTERPRETED, LAUNCH_OPTIONS, cos_sin, narrow, on_device, widen

# Not yet chosen by time on a device.
TOKEN_BLOCK: Final = 16
_CONSTANTS: Final = (KEY_DIM, MIN_PEAK, PAGE_BYTES, PAGE_TOKENS, SCALES_AT, IS_INTERPRETED, TOKEN_BLOCK)


def splice_index(
    pages: LayerBuffers,
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
    *,
    is_mixed: bool,
    source: LayerBuffers | None = None,
) -> None:
    """See `pic_kernels.splice_index`; one launch on the current stream, nothing is read back."""
    n = src.numel()
    with on_device(src.device):
        _splice_index_kernel[(-(-n // TOKEN_BLOCK), len(pages))](
            (source or pages).addresses_on(pages.device),
            pages.addresses,
            src.contiguous(),
            dst.contiguous(),
            shifts.contiguous(),
            rope.turns,
            n,
            rope.rotary_dim,
            rope.is_neox_style,
            is_mixed,
            *_CONSTANTS,
            **LAUNCH_OPTIONS,
        )


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["src", "dst", "shifts"])
def _splice_index_kernel(
    read_table,
    write_table,
    src,
    dst,
    shifts,
    turns,
    num_tokens,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    IS_MIXED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    MIN_PEAK: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SCALES_AT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    HALF: tl.constexpr = ROTARY_DIM // 2
    # The other dimension of a pair differs in one bit of its number.
    APART: tl.constexpr = HALF if IS_NEOX else 1
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    live = token < num_tokens
    source = tl.load(src + token, mask=live, other=0)
    target = tl.load(dst + token, mask=live, other=0)
    shift = tl.load(shifts + token, mask=live, other=0).to(tl.int64)
    # NOTE: buffers of pages start at multiples of 16 bytes, as `coverage` has it.
    base = tl.load(read_table + tl.program_id(1))
    held_keys = tl.multiple_of(base.to(tl.pointer_type(tl.int8)), 16)
    held_scales = tl.multiple_of(base.to(tl.pointer_type(tl.int32)), 16)
    base = tl.load(write_table + tl.program_id(1))
    keys = tl.multiple_of(base.to(tl.pointer_type(tl.int8)), 16)
    scales = tl.multiple_of(base.to(tl.pointer_type(tl.int32)), 16)
    read_at = source // PAGE_TOKENS * PAGE_BYTES + source % PAGE_TOKENS * KEY_DIM
    write_at = target // PAGE_TOKENS * PAGE_BYTES + target % PAGE_TOKENS * KEY_DIM
    read_scale = (source // PAGE_TOKENS * PAGE_BYTES + SCALES_AT) // 4 + source % PAGE_TOKENS
    write_scale = (target // PAGE_TOKENS * PAGE_BYTES + SCALES_AT) // 4 + target % PAGE_TOKENS

    lane = tl.arange(0, KEY_DIM)[None, :]
    held = tl.load(held_keys + read_at[:, None] + lane, mask=live[:, None], other=0)  # [BLOCK_T, KEY_DIM]
    held_scale = tl.load(held_scales + read_scale, mask=live, other=0)
    scale = held_scale.to(tl.float32, bitcast=True)[:, None]
    key = widen(held, tl.float8e4nv) * scale
    if IS_MIXED:
        key = _hadamard(key, lane, KEY_DIM, BLOCK_T)
    partner = tl.gather(key, tl.broadcast_to(lane ^ APART, (BLOCK_T, KEY_DIM)), 1)
    pair = lane % HALF if IS_NEOX else lane // 2 % HALF
    cos, sin = cos_sin(shift[:, None], tl.load(turns + pair))
    turned = key * cos + tl.where((lane & APART) == 0, -partner, partner) * sin
    key = tl.where(lane < ROTARY_DIM, turned, key)
    if IS_MIXED:
        key = _hadamard(key, lane, KEY_DIM, BLOCK_T)

    moved_scale = tl.maximum(tl.reduce(tl.abs(key), 1, _larger), MIN_PEAK) / 448.0
    moved = narrow(key / moved_scale[:, None], tl.int8, tl.float8e4nv, INTERPRETED)
    still = shift == 0
    tl.store(keys + write_at[:, None] + lane, tl.where(still[:, None], held, moved), mask=live[:, None])
    tl.store(scales + write_scale, tl.where(still, held_scale, moved_scale.to(tl.int32, bitcast=True)), mask=live)


@triton.jit
def _hadamard(key, lane, KEY_DIM: tl.constexpr, BLOCK_T: tl.constexpr):
    """The orthonormal Hadamard transform of every row: its own inverse."""
    for step in tl.static_range(7):
        other = tl.gather(key, tl.broadcast_to(lane ^ (1 << step), (BLOCK_T, KEY_DIM)), 1)
        key = tl.where((lane & (1 << step)) != 0, other - key, key + other)
    return key * 0.08838834764831845  # 128 ** -0.5


# NOTE: `tl.max` would be Triton's own function, which is not interpreted where Triton was imported to compile.
@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)
