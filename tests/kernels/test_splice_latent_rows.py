"""`splice_rows` of latent attention: the latent moves untouched, only its rotary slice turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pic_bench.gpu.kernel_pool import exact_turn
from pic_kernels import splice_rows
from pic_kernels.numerics import ROTATE_REL_L2, relative_l2

from tests.helpers.splice_cases import (
    EAGER,
    FAR,
    SLOTS,
    Slots,
    Target,
    check_splice,
    free_memory,
    fused,
    make_rope,
    on_cpu,
    random_rows,
    scattered,
)

CASES = ("short and long spans", "a span that does not move", "scattered, a shift each", "pages of 16")


def _check(
    target: Target,
    slots: Slots,
    dtype: torch.dtype,
    latent: int,
    rotary_dim: int,
    *,
    is_neox: bool,
    rest: int = 0,
    heads: int = 1,
) -> None:
    """Rows of a latent, a rotary part and `rest` dimensions more."""
    rope, dim = make_rope(rotary_dim, is_neox=is_neox), latent + rotary_dim + rest
    check_splice(target.device, slots, dtype, heads, (dim,), rope, rope_offset=latent)


@pytest.mark.parametrize("dtype", ROTATE_REL_L2, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_slots_dtypes_and_layouts(target: Target, case: str, dtype: torch.dtype) -> None:
    """Every case with every dtype, and both pair layouts with each case and with each dtype."""
    is_neox = (CASES.index(case) + list(ROTATE_REL_L2).index(dtype)) % 2 == 0
    _check(target, target.sized(SLOTS[case]), dtype, latent=512, rotary_dim=64, is_neox=is_neox)


def test_far_shifts(target: Target) -> None:
    for dtype in ROTATE_REL_L2:
        _check(target, FAR, dtype, latent=32, rotary_dim=64, is_neox=False)


@settings(max_examples=100)
@given(
    n=st.integers(1, 80),
    seed=st.integers(0, 2**16),
    heads=st.integers(1, 4),
    latent=st.integers(0, 9),
    rotary_dim=st.integers(1, 70).map(lambda half: 2 * half),
    rest=st.integers(0, 5),
    is_neox=st.booleans(),
    dtype=st.sampled_from(tuple(ROTATE_REL_L2)),
)
def test_any_offset(n: int, seed: int, dtype: torch.dtype, **form: Any) -> None:
    """The rotary slice may begin anywhere, also where it is not aligned to anything."""
    shifts = torch.randint(-3, 4, (n,), generator=torch.Generator().manual_seed(seed))
    slots = scattered(n, shifts * 5_000, seed=seed)
    _check(EAGER, slots, dtype, **form)


@fused
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 60),
    seed=st.integers(0, 2**16),
    latent=st.integers(0, 40),
    half=st.integers(1, 8),
    is_neox=st.booleans(),
    dtype=st.sampled_from(tuple(ROTATE_REL_L2)),
)
def test_any_offset_of_the_fused_kernel(
    target: Target, n: int, seed: int, latent: int, half: int, is_neox: bool, dtype: torch.dtype
) -> None:
    """The same, with rows filled up to whole 16 bytes; interleaved pairs start at even dimensions."""
    shifts = torch.randint(-3, 4, (n,), generator=torch.Generator().manual_seed(seed))
    slots = scattered(n, shifts * 5_000, seed=seed)
    latent = latent if is_neox else 2 * latent
    rest = -(latent + 2 * half) % (16 // dtype.itemsize)
    _check(target, slots, dtype, latent, 2 * half, is_neox=is_neox, rest=rest)


@on_cpu
def test_offsets_beyond_32_bits(target: Target) -> None:
    """Slots whose bytes, 4-byte words and elements are further than 2^31 from the buffer's start."""
    rows = free_memory(8_000_000 * 1_152).view(torch.bfloat16).view(-1, 1, 576)
    src, dst, shifts = torch.tensor([7_999_998, 3]), torch.tensor([4, 7_999_999]), torch.tensor([9, -9])
    rows[src] = random_rows((2, 1, 576), torch.bfloat16)
    rope = make_rope(64, is_neox=False)
    splice_rows([rows], None, src, dst, shifts, rope, rope_offset=512)
    assert torch.equal(rows[dst][..., :512], rows[src][..., :512])
    exact = exact_turn(rows[src][..., 512:], shifts, rope)
    assert relative_l2(rows[dst][..., 512:], exact) <= ROTATE_REL_L2[torch.bfloat16]


@pytest.mark.parametrize("rope_offset", [-1, 9])
def test_a_rotary_slice_outside_the_row_is_refused(rope_offset: int) -> None:
    one, rows, rope = torch.tensor([1]), [torch.zeros(4, 1, 12)], make_rope(4, is_neox=False)
    with pytest.raises(ValueError, match="rotary part"):
        splice_rows(rows, None, one, one + 1, one, rope, rope_offset=rope_offset)
