"""The references against float64, which every other implementation is measured by; and what the fused kernels compute
with: exact angles, every rounding, the bits of shift 0."""

from __future__ import annotations

import math

import pytest
import torch
from pic_bench.gpu.kernel_pool import exact_turn
from pic_kernels import RopeParams, reference, splice_rows
from pic_kernels.numerics import MAX_TESTED_SHIFT, ROTATE_REL_L2, relative_l2
from pic_kernels.reference.rotate import rotate

from tests.helpers.splice_cases import Target, bits_of, fused, make_rope, random_rows

SHIFTS = (1, -1, 17, 4_095, -30_000, MAX_TESTED_SHIFT, -MAX_TESTED_SHIFT)


@pytest.mark.parametrize("dtype", ROTATE_REL_L2, ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [2, 64, 128])
def test_rotation_agrees_with_rows_computed_at_the_target(dtype: torch.dtype, is_neox: bool, rotary_dim: int) -> None:
    """A donor's row, rounded as the pool keeps it and moved, is the row computed there, at any distance."""
    rope = make_rope(rotary_dim, is_neox=is_neox)
    exact = random_rows((64, 4, rotary_dim), torch.float32).to(torch.float64)
    start = torch.arange(64) + MAX_TESTED_SHIFT
    donor = exact_turn(exact, start, rope).to(torch.float32).to(dtype)
    for shift in SHIFTS:
        moved = rotate(donor, torch.full((64,), shift), rope)
        fresh = exact_turn(exact, start + shift, rope)
        assert relative_l2(moved, fresh) <= ROTATE_REL_L2[dtype]


def _moved(target: Target, rows: torch.Tensor, shifts: torch.Tensor, rope: RopeParams) -> torch.Tensor:
    """`rows` `[n, 1, dim]` after a splice by `shifts` on the target."""
    n = rows.shape[0]
    pool = torch.cat((rows, torch.zeros_like(rows))).to(target.device)
    slots = torch.arange(2 * n, device=target.device)
    rope = rope.to(target.device)
    splice_rows([pool], None, slots[:n], slots[n:], shifts.to(target.device), rope)
    return pool[n:].cpu()


@fused
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16], ids=str)
def test_every_rounding_is_torchs(target: Target, dtype: torch.dtype, is_neox: bool) -> None:
    """Half of FP8's pairs of values, subnormals and the largest too, turned by an eighth: a carry, a saturation or a
    subnormal that went wrong is many codes off, a cosine one bit off moves a tie in ten thousand by one."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # NaN apart: the interpreter reads it as 480
    values = codes.view(torch.float8_e4m3fn).to(torch.float32)
    pairs = torch.cartesian_prod(values, values)[: 254 * 252].view(-1, 1, 252, 2)
    rows = (pairs.transpose(2, 3) if is_neox else pairs).flatten(2).contiguous().to(dtype)
    # FP8 has its own rounding in the interpreter, the others less of it: a part of the pairs will do.
    rows = torch.nn.functional.pad(rows.to(torch.float32), (0, 8)).to(dtype)[:: 2 if dtype.itemsize == 1 else 8]
    rope = RopeParams(torch.full((252,), math.pi / 4), 504, is_neox)
    shifts = torch.ones(rows.shape[0], dtype=torch.int64)
    both = torch.cat((rows, rows))
    slots = torch.arange(both.shape[0])
    reference.splice_rows([both], None, slots[: len(rows)], slots[len(rows) :], shifts, rope)
    got, want = (bits_of(each).to(torch.int32) for each in (_moved(target, rows, shifts, rope), both[len(rows) :]))
    differ = got != want
    assert differ.to(torch.float32).mean() <= 2e-3
    # Around zero a last bit may cross the sign: compare magnitudes there.
    limit = 1 if dtype == torch.float8_e4m3fn else 2
    far = differ & ((got - want).abs() > limit) & (both[len(rows) :].to(torch.float32).abs() > 1e-4)
    assert not far.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_shift_zero_keeps_every_bit(target: Target, dtype: torch.dtype) -> None:
    """In every implementation; also where arithmetic would not: signed zeros, infinities, NaN with a payload."""
    rows = torch.arange(256, dtype=torch.uint8).repeat(2).view(8, 1, 64).view(dtype)
    rows = rows.reshape(-1, 1, rows.shape[2])
    for is_neox in (True, False):
        rope = make_rope(rows.shape[2], is_neox=is_neox)
        moved = _moved(target, rows, torch.zeros(rows.shape[0], dtype=torch.int32), rope)
        assert torch.equal(bits_of(moved), bits_of(rows))
