"""The references against float64: what every other implementation is measured by."""

from __future__ import annotations

import pytest
import torch
from pic_bench.gpu.kernel_pool import exact_turn
from pic_kernels.numerics import MAX_TESTED_SHIFT, ROTATE_REL_L2, relative_l2
from pic_kernels.reference.rotate import rotate
from splice_cases import bits_of, make_rope, random_rows

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


@pytest.mark.parametrize("dtype", ROTATE_REL_L2, ids=str)
def test_shift_zero_returns_the_same_bits(dtype: torch.dtype) -> None:
    """Also where arithmetic would not: signed zeros, infinities, NaN."""
    rows = random_rows((4, 2, 8), dtype)
    rows[0, 0, :4] = torch.tensor([-0.0, torch.inf, -torch.inf, torch.nan]).to(dtype)
    for is_neox in (True, False):
        turned = rotate(rows, torch.zeros(4, dtype=torch.int32), make_rope(8, is_neox=is_neox))
        assert torch.equal(bits_of(turned), bits_of(rows))


def test_fp8_saturates() -> None:
    """A pair at the edge of e4m3 turns past it: 448 + 448 at 45 degrees is 634."""
    rope = make_rope(2, is_neox=True)
    rows = torch.full((3, 1, 2), 448.0).to(torch.float8_e4m3fn)
    turned = rotate(rows, torch.tensor([-1, 1, 2]), rope).to(torch.float32)
    assert turned.isfinite().all()
    assert turned.abs().max() == 448.0
