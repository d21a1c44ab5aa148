"""`splice_mla`: the latent moves untouched, only its rotary slice turns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pic_bench.gpu.kernel_pool import exact_turn
from pic_kernels import splice_mla
from pic_kernels.numerics import MAX_TESTED_SHIFT, ROTATE_REL_L2, relative_l2
from splice_cases import Slots, check_splice, make_rope, pages, random_rows, scattered, spans
from targets import HOST, Target, free_memory, fused

SLOTS = {
    "spans": spans([40, 3, 70], [12, 1, -9]),
    "a span that does not move": spans([50, 33], [0, 7]),
    "scattered": scattered(77, torch.arange(77) - 30),
    "pages of 16": pages(5, 16, 48),
}


def _check(
    target: Target, slots: Slots, dtype: torch.dtype, latent: int, rotary_dim: int, *, is_neox: bool, rest: int = 0
) -> None:
    """Rows of a latent, a rotary part and `rest` dimensions more."""
    rope, dim = make_rope(rotary_dim, is_neox=is_neox), latent + rotary_dim + rest
    check_splice(target.device, slots, dtype, 1, (dim,), rope, rope_offset=latent)


@pytest.mark.parametrize("dtype", ROTATE_REL_L2, ids=str)
@pytest.mark.parametrize("case", SLOTS)
def test_slots_dtypes_and_layouts(target: Target, case: str, dtype: torch.dtype) -> None:
    """Every case with every dtype, and both pair layouts with each case and with each dtype."""
    is_neox = (list(SLOTS).index(case) + list(ROTATE_REL_L2).index(dtype)) % 2 == 0
    _check(target, target.sized(SLOTS[case]), dtype, latent=512, rotary_dim=64, is_neox=is_neox)


def test_far_shifts(target: Target) -> None:
    far = scattered(60, torch.tensor([MAX_TESTED_SHIFT, -MAX_TESTED_SHIFT] * 30, dtype=torch.int32))
    for dtype in ROTATE_REL_L2:
        _check(target, far, dtype, latent=32, rotary_dim=64, is_neox=False)


@settings(max_examples=80)
@given(
    n=st.integers(1, 80),
    seed=st.integers(0, 2**16),
    latent=st.integers(0, 9),
    half=st.integers(1, 8),
    rest=st.integers(0, 3),
    is_neox=st.booleans(),
    dtype=st.sampled_from(tuple(ROTATE_REL_L2)),
)
def test_any_offset(n: int, seed: int, latent: int, half: int, rest: int, is_neox: bool, dtype: torch.dtype) -> None:
    """The rotary slice may begin anywhere, also where it is not aligned to anything."""
    shifts = torch.randint(-3, 4, (n,), generator=torch.Generator().manual_seed(seed))
    slots = scattered(n, shifts * 5_000, seed=seed)
    _check(HOST, slots, dtype, latent, 2 * half, is_neox=is_neox, rest=rest)


@fused
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_offsets_beyond_32_bits(target: Target) -> None:
    """Slots whose bytes, 4-byte words and elements are further than 2^31 from the buffer's start."""
    if target.device != "cpu":
        pytest.skip("takes memory on a device; addresses are computed as in the interpreter")
    rows = free_memory(8_000_000 * 1_152).view(torch.bfloat16).view(-1, 1, 576)
    src, dst, shifts = torch.tensor([7_999_998, 3]), torch.tensor([4, 7_999_999]), torch.tensor([9, -9])
    rows[src] = random_rows((2, 1, 576), torch.bfloat16)
    rope = make_rope(64, is_neox=False)
    splice_mla([rows], src, dst, shifts, rope, rope_offset=512)
    assert torch.equal(rows[dst][..., :512], rows[src][..., :512])
    exact = exact_turn(rows[src][..., 512:], shifts, rope)
    assert relative_l2(rows[dst][..., 512:], exact) <= ROTATE_REL_L2[torch.bfloat16]


@pytest.mark.parametrize("rope_offset", [-1, 9])
def test_a_rotary_slice_outside_the_row_is_refused(rope_offset: int) -> None:
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="rotary part"):
        splice_mla([torch.zeros(4, 1, 12)], one, one + 1, one, make_rope(4, is_neox=False), rope_offset=rope_offset)
