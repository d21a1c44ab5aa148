"""The device functions of the fused kernel: rows copied in words, rotary pairs rotated by a shift. Imports triton.

Work is cut into *units*: the bytes that one thread reads at once from one layer, 16 wherever the row divides into them.
Units are numbered through all tokens, heads and words of a part, so that a block is full for rows of any width:
24 units of SmolLM2's 384 bytes leave no lane idle, where a tile of whole rows would idle a quarter of them. A program
moves one block of units in several layers, and forms slots and angle of a token once for all of them.

The angle of a pair is a number of turns. `RopeParams.turns` holds turns per position in units of 2^-64; times the
shift, in 64-bit integers that wrap, that is the fraction of a turn *exactly*: whole turns fall off at the top. Its
upper 32 bits (1.5e-9 rad) are brought into an eighth of a turn about zero, where short polynomials reach float32. This
needs no table of angles and no float64, and a negative shift is no special case.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# NOTE: Triton infers the types in device functions; Python has none for them.

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import gcd
from typing import Final

import torch
import triton
import triton.language as tl
from triton import knobs

IS_INTERPRETED: Final[bool] = bool(knobs.runtime.interpret)
"""Whether `TRITON_INTERPRET=1` was set when this module was imported: kernels run on CPU tensors, in numpy."""

# Chosen by the code that sm_90 gets (tests/kernels/test_kernel_code.py), not yet by time on a device: eight loads of
# 16 bytes in flight per thread, registers for at least 768 threads a multiprocessor, no spills.
LAYER_BLOCK: Final = 4
"""Layers per program."""
ROTARY_BLOCK: Final = 128
"""Units per program that rotates pairs."""
COPY_BLOCK: Final = 256
"""Units per program that copies."""
LAUNCH_OPTIONS: Final = {"num_warps": 4, "enable_fp_fusion": True}
"""How the kernels are compiled."""

FLOATS: Final = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}
"""Triton's names of the rows' dtypes."""

ACCESS_BYTES: Final = 16
"""The widest access a thread can make."""


def rotary_unit_pairs(dim: int, offset: int, rotary_dim: int, dtype: torch.dtype, *, is_neox: bool) -> int:
    """Pairs of a unit of the rotary part: as many as its accesses can hold and every pair allows."""
    # NeoX pairs are two accesses half a part away from one another, interleaved ones lie in the same access.
    per_word = 1 if is_neox else 2
    return gcd(ACCESS_BYTES // (dtype.itemsize * per_word), rotary_dim // 2, offset // per_word, dim // per_word)


def unit_bytes(*stretches: int) -> int:
    """Bytes of a unit of copied rows that are made of `stretches` bytes."""
    return gcd(ACCESS_BYTES, *stretches)


def num_blocks(num_tokens: int, units: int, block: int) -> int:
    """Blocks of `block` units that `num_tokens` rows of `units` units fill."""
    return -(-num_tokens * units // block)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launches inside go to `device`, on its current stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@triton.jit
def copy_units(
    tables,
    slots,
    block,
    SEGMENTS: tl.constexpr,
    SEGMENT_BYTES: tl.constexpr,
    HOLE_START: tl.constexpr,
    HOLE_BYTES: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Copy block `block` (int64) of rows in the layers of this program, bit for bit.

    `tables` are the addresses of the source's layers and of the target's. `slots` is (source slots, target slots, their
    number as int64, number of layers). A row is `SEGMENTS` segments, each
    without its bytes `[HOLE_START, HOLE_START + HOLE_BYTES)`.
    """
    src, dst, num_tokens, num_layers = slots
    WORD: tl.constexpr = tl.int32 if UNIT_BYTES % 4 == 0 else (tl.int16 if UNIT_BYTES == 2 else tl.int8)
    WORD_BYTES: tl.constexpr = 4 if UNIT_BYTES % 4 == 0 else UNIT_BYTES
    UNIT_WORDS: tl.constexpr = UNIT_BYTES // WORD_BYTES
    PER_SEGMENT: tl.constexpr = (SEGMENT_BYTES - HOLE_BYTES) // UNIT_BYTES
    token, unit, live = _locate(block, num_tokens, SEGMENTS * PER_SEGMENT, BLOCK_U)  # [BLOCK_U]
    source = tl.load(src + token, mask=live, other=0)
    target = tl.load(dst + token, mask=live, other=0)
    word = (unit % PER_SEGMENT) * UNIT_WORDS
    if HOLE_BYTES > 0:
        # NOTE: a product, not a choice of two constants: from a product the compiler sees that units stay aligned.
        word += (word >= HOLE_START // WORD_BYTES).to(tl.int32) * (HOLE_BYTES // WORD_BYTES)
    word += (unit // PER_SEGMENT) * (SEGMENT_BYTES // WORD_BYTES)
    ROW_WORDS: tl.constexpr = SEGMENTS * SEGMENT_BYTES // WORD_BYTES
    lane = tl.arange(0, UNIT_WORDS)[None, :]
    read_at = (source * ROW_WORDS + word)[:, None] + lane  # [BLOCK_U, UNIT_WORDS]
    write_at = (target * ROW_WORDS + word)[:, None] + lane
    sources, bases, masks = _layer_rows(tables, num_layers, token, num_tokens, WORD, BLOCK_L)
    held = ()
    for at in tl.static_range(BLOCK_L):
        held += (tl.load(sources[at] + read_at, mask=masks[at], other=0),)
    for at in tl.static_range(BLOCK_L):
        tl.store(bases[at] + write_at, held[at], mask=masks[at])


@triton.jit
def rotate_units(
    tables,
    slots,
    shifts,
    turns,
    block,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    OFFSET: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    FLOAT: tl.constexpr,
    UNIT_PAIRS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Move block `block` (int64) of the rotary parts, in the layers of this program, rotated by the tokens' shifts.

    Elements are addressed in words: an element of either half for NeoX pairs, a whole pair for interleaved ones.
    """
    src, dst, num_tokens, num_layers = slots
    HALF: tl.constexpr = ROTARY_DIM // 2
    PER_WORD: tl.constexpr = 1 if IS_NEOX else 2
    WIDTH: tl.constexpr = FLOAT.primitive_bitwidth * PER_WORD
    WORD: tl.constexpr = (
        tl.int64 if WIDTH == 64 else (tl.int32 if WIDTH == 32 else (tl.int16 if WIDTH == 16 else tl.int8))
    )
    PER_HEAD: tl.constexpr = HALF // UNIT_PAIRS
    token, unit, live = _locate(block, num_tokens, HEADS * PER_HEAD, BLOCK_U)  # [BLOCK_U]
    source = tl.load(src + token, mask=live, other=0)
    target = tl.load(dst + token, mask=live, other=0)
    shift = tl.load(shifts + token, mask=live, other=0).to(tl.int64)[:, None]
    pair = (unit % PER_HEAD) * UNIT_PAIRS
    word = (unit // PER_HEAD) * (DIM // PER_WORD) + OFFSET // PER_WORD + pair
    ROW_WORDS: tl.constexpr = HEADS * DIM // PER_WORD
    lane = tl.arange(0, UNIT_PAIRS)[None, :]
    read_at = (source * ROW_WORDS + word)[:, None] + lane  # [BLOCK_U, UNIT_PAIRS]
    write_at = (target * ROW_WORDS + word)[:, None] + lane
    # NOTE: x * 1 - y * 0 loses the sign of a zero and turns an infinity into NaN, hence the choice by bits below.
    still = shift == 0
    sources, bases, masks = _layer_rows(tables, num_layers, token, num_tokens, WORD, BLOCK_L)
    held, partners = (), ()
    for at in tl.static_range(BLOCK_L):
        held += (tl.load(sources[at] + read_at, mask=masks[at], other=0),)
        if IS_NEOX:
            partners += (tl.load(sources[at] + read_at + HALF, mask=masks[at], other=0),)
    cos, sin = cos_sin(shift, tl.load(turns + pair[:, None] + lane))  # [BLOCK_U, UNIT_PAIRS]
    for at in tl.static_range(BLOCK_L):
        if IS_NEOX:
            a, b = widen(held[at], FLOAT), widen(partners[at], FLOAT)
            turned_a = narrow(a * cos - b * sin, WORD, FLOAT, INTERPRETED)
            turned_b = narrow(b * cos + a * sin, WORD, FLOAT, INTERPRETED)
            tl.store(bases[at] + write_at, tl.where(still, held[at], turned_a), mask=masks[at])
            tl.store(bases[at] + write_at + HALF, tl.where(still, partners[at], turned_b), mask=masks[at])
        else:
            a, b = _unpack(held[at], FLOAT)
            turned = _pack(a * cos - b * sin, b * cos + a * sin, WORD, FLOAT, INTERPRETED)
            tl.store(bases[at] + write_at, tl.where(still, held[at], turned), mask=masks[at])


@triton.jit
def _locate(block, num_tokens, UNITS: tl.constexpr, BLOCK_U: tl.constexpr):
    """Token (int64), unit within its row (int32) and whether there is one, for every lane of a block."""
    first = block * BLOCK_U
    first_token = first // UNITS
    # Divided once as one 64-bit number; the lanes divide 32-bit ones.
    unit = (first - first_token * UNITS).to(tl.int32) + tl.arange(0, BLOCK_U)
    token = first_token + unit // UNITS
    return token, unit % UNITS, token < num_tokens


@triton.jit
def _layer_rows(tables, num_layers, token, num_tokens, WORD: tl.constexpr, BLOCK_L: tl.constexpr):
    """For each layer of this program its source, its buffer, and the mask `[BLOCK_U, 1]` of the units to move in it.

    All addresses are read before the first row, and all rows before the first is written: the compiler cannot know that
    no buffer overlaps another or the table, so it keeps the order, and loads would wait for one another.
    """
    source_table, table = tables
    sources, bases, masks = (), (), ()
    for at in tl.static_range(BLOCK_L):
        layer = tl.program_id(1) * BLOCK_L + at
        present = layer < num_layers
        source = tl.load(source_table + layer, mask=present, other=0)
        address = tl.load(table + layer, mask=present, other=0)
        # NOTE: `coverage` promises this alignment; without the claim accesses are as narrow as a word.
        sources += (tl.multiple_of(source.to(tl.pointer_type(WORD)), 16),)
        bases += (tl.multiple_of(address.to(tl.pointer_type(WORD)), 16),)
        masks += ((token < tl.where(present, num_tokens, 0))[:, None],)
    return sources, bases, masks


@triton.jit
def cos_sin(shift, turns):
    """Cosine and sine, float32, of `shift` (int64) positions at `turns` (int64, 2^-64 turns per position)."""
    phase = ((shift * turns) >> 32).to(tl.int32)
    # Nearest quarter turn, in [-2, 2], and the rest, in [-2^29, 2^29): the low 30 bits with their sign. Written so
    # that no 32-bit number overflows.
    quarter = ((phase >> 29) + 1) >> 1
    x = ((phase << 2) >> 2).to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2^32
    # Taylor up to x^9: at an eighth of a turn the error is 2e-9 of the sine and 2.5e-8 of the cosine.
    y = x * x
    sin = x + x * y * (-0.16666667 + y * (0.008333334 + y * (-0.0001984127 + y * 2.7557319e-06)))
    cos = 1.0 + y * (-0.5 + y * (0.041666668 + y * (-0.0013888889 + y * 2.4801588e-05)))
    swap = (quarter & 1) != 0
    c, s = tl.where(swap, sin, cos), tl.where(swap, cos, sin)
    return tl.where(((quarter + 1) & 2) != 0, -c, c), tl.where((quarter & 2) != 0, -s, s)


@triton.jit
def widen(bits, kind: tl.constexpr):
    """The float32 value that `bits` encode."""
    return bits.to(kind, bitcast=True).to(tl.float32)


@triton.jit
def _unpack(words, kind: tl.constexpr):
    """Both values of interleaved pairs, float32: the first is in the low bits."""
    WIDTH: tl.constexpr = kind.primitive_bitwidth
    BITS: tl.constexpr = tl.int32 if WIDTH == 32 else (tl.int16 if WIDTH == 16 else tl.int8)
    return widen(words.to(BITS), kind), widen((words >> WIDTH).to(BITS), kind)


@triton.jit
def _pack(a, b, word: tl.constexpr, kind: tl.constexpr, interpreted: tl.constexpr):
    """The words of interleaved pairs, each value rounded once."""
    WIDTH: tl.constexpr = kind.primitive_bitwidth
    BITS: tl.constexpr = tl.int32 if WIDTH == 32 else (tl.int16 if WIDTH == 16 else tl.int8)
    low = narrow(a, BITS, kind, interpreted).to(word) & ((1 << WIDTH) - 1)
    return low.to(word) | (narrow(b, BITS, kind, interpreted).to(word) << WIDTH)


@triton.jit
def narrow(value, bits: tl.constexpr, kind: tl.constexpr, interpreted: tl.constexpr):
    """The bits of float32 `value` rounded once, ties to even; FP8 saturates at 448 and keeps NaN."""
    if interpreted:
        # The interpreter's own casts truncate bf16, lose the carry of an FP8 mantissa and do not saturate.
        if kind == tl.bfloat16:
            return _round_to_bf16(value).to(bits)
        if kind == tl.float8e4nv:
            return _round_to_e4m3(value).to(bits)
    # NOTE: an NVIDIA GPU has one cast to e4m3, `cvt.rn.satfinite`, which saturates by itself; clamping first would be a
    # fifth of the kernel's instructions. `coverage` keeps other GPUs out.
    return value.to(kind).to(bits, bitcast=True)


@triton.jit
def _round_to_bf16(value):
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    return ((bits >> 16) & -0x8000) | tl.where(magnitude > 0x7F800000, 0x7FC0, rounded)


@triton.jit
def _round_to_e4m3(value):
    bits = value.to(tl.int32, bitcast=True)
    # 448 in float32 is 0x43E00000, infinity 0x7F800000.
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    magnitude = tl.where((bits & 0x7FFFFFFF) > 0x43E00000, 0x43E00000, bits & 0x7FFFFFFF)
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120 << 23)) >> 20
    # Below 2^-6 the grid is even, 2^-9: adding 2^14 lets the float32 adder round to it.
    small = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return ((bits >> 24) & -0x80) | tl.where(is_nan, 0x7F, tl.where(magnitude < (121 << 23), small, normal))
