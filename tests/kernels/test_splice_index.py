"""`splice_index`: a moved index key is the key that an indexer computes at the new position, quantised there."""

from __future__ import annotations

import pytest
import torch
from pic_kernels import LayerBuffers, RopeParams, splice_index
from pic_kernels.index_pages import KEY_DIM, PAGE_BYTES, quantise, read_keys, split_pages
from pic_kernels.numerics import INDEX_REL_L2, relative_l2
from torch import Tensor

from tests.helpers.machine_code import compile_for_gpu, read_machine_code
from tests.helpers.splice_cases import FAR, SLOTS, Slots, Target, free_memory, load_kernels, make_rope, on_cpu, pages

NAMED = ("short and long spans", "a span that does not move", "scattered, a shift each")
CASES = {**{name: SLOTS[name] for name in NAMED}, "pages": pages(3, 64, 48), "far": FAR}
FORMS = {"mixed": (True, True), "interleaved": (False, False), "mixed, interleaved": (False, True)}
"""Pairs of halves or of neighbours, and whether the Hadamard transform follows; the first is DeepSeek-V3.2 on CUDA, the
second GLM-5."""


def stored(raw: Tensor, positions: Tensor, rope: RopeParams, *, is_mixed: bool) -> Tensor:
    """The keys `raw` `[n, 128]` at `positions`, float64: rotated through complex numbers, mixed by a matrix."""
    rotary, half = raw[:, : rope.rotary_dim].double(), rope.rotary_dim // 2
    by_pair = rotary.unflatten(1, (2, half) if rope.is_neox_style else (half, 2))
    first, second = by_pair.unbind(1 if rope.is_neox_style else 2)
    angles = positions.double()[:, None] * rope.inv_freq.double()
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    pairs = torch.stack((turned.real, turned.imag), dim=1 if rope.is_neox_style else 2).flatten(1)
    keys = torch.cat((pairs, raw[:, rope.rotary_dim :].double()), dim=1)
    ones = torch.arange(KEY_DIM)[:, None] & torch.arange(KEY_DIM)
    signs = torch.tensor([[(-1.0) ** int(each).bit_count() for each in row] for row in ones.tolist()])
    return keys @ signs.double() / KEY_DIM**0.5 if is_mixed else keys


def write(buffer: Tensor, slots: Tensor, wanted: Tensor) -> None:
    keys, scales = split_pages(buffer)
    numbers, factors = quantise(wanted.float())
    keys[slots // 64, slots % 64], scales[slots // 64, slots % 64] = numbers.view(torch.uint8), factors


def make_pages(slots: Slots, layers: int) -> list[Tensor]:
    """Buffers in which every byte is a NaN."""
    shape = (-(-slots.num_slots // 64), 1, PAGE_BYTES)
    return [torch.full(shape, 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in range(layers)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_a_moved_key_is_the_one_computed_there(target: Target, case: str, form: str) -> None:
    """In two layers, at positions up to 140,000; all else keeps its bytes, and so does a key with shift 0."""
    slots, (is_neox, is_mixed) = target.sized(CASES[case]), FORMS[form]
    rope, buffers = make_rope(64, is_neox=is_neox), make_pages(slots, layers=2)
    draw = torch.Generator().manual_seed(1)
    positions = torch.randint(0, 9_000, slots.src.shape, generator=draw) + slots.shifts.min().clamp(max=0).abs()
    # Outliers, so that a scale may change by the rotation.
    raws = [torch.randn(len(positions), KEY_DIM, generator=draw) ** 3 for _ in buffers]
    for buffer, raw in zip(buffers, raws, strict=True):
        write(buffer, slots.src, stored(raw, positions, rope, is_mixed=is_mixed))
    before = [buffer.view(torch.uint8).clone() for buffer in buffers]
    moved = [buffer.to(target.device) for buffer in buffers]
    splice_index(moved, *slots.on(target.device), rope.to(target.device), is_mixed=is_mixed)
    # The same from buffers of their own, as from those in host memory.
    apart = [torch.zeros_like(buffer) for buffer in moved]
    source = LayerBuffers([buffer.to(target.device) for buffer in buffers])
    splice_index(apart, *slots.on(target.device), rope.to(target.device), is_mixed=is_mixed, source=source)
    for buffer, other in zip(moved, apart, strict=True):
        assert torch.equal(read_keys(buffer.cpu(), slots.dst), read_keys(other.cpu(), slots.dst))
    still = slots.shifts == 0
    for old, buffer, raw in zip(before, moved, raws, strict=True):
        there = stored(raw, positions + slots.shifts, rope, is_mixed=is_mixed)
        error = (read_keys(buffer.cpu(), slots.dst).double() - there).norm(dim=1) / there.norm(dim=1)
        assert error.max() <= INDEX_REL_L2
        kept = torch.ones(64 * len(old), dtype=torch.bool)
        kept[slots.dst] = False
        for now, then in zip(split_pages(buffer.cpu()), split_pages(old), strict=True):
            # As bytes, because a NaN is not equal to itself.
            new, gone = (each.reshape(len(kept), -1).view(torch.uint8) for each in (now, then))
            assert torch.equal(new[slots.dst[still]], gone[slots.src[still]])
            assert torch.equal(new[kept], gone[kept])


def test_a_key_left_unturned_or_mixed_otherwise_shows() -> None:
    """The tolerance can fail: by far, where the Hadamard transform is forgotten or the shift is."""
    slots, rope = CASES["pages"], make_rope(64, is_neox=True)
    raw, zeros = torch.randn(len(slots.src), KEY_DIM), torch.zeros(len(slots.src), dtype=torch.int64)
    (buffer,) = make_pages(slots, layers=1)
    write(buffer, slots.src, stored(raw, zeros, rope, is_mixed=True))
    there = stored(raw, zeros + 48, rope, is_mixed=True)
    for shifts, is_mixed in ((slots.shifts, False), (zeros, True), (-slots.shifts, True)):
        splice_index([buffer], slots.src, slots.dst, shifts, rope, is_mixed=is_mixed)
        assert relative_l2(read_keys(buffer, slots.dst), there) > 0.3


@on_cpu
def test_offsets_beyond_32_bits(target: Target) -> None:
    """Slots whose bytes and 4-byte words are further than 2^31 from the buffer's start."""
    num_pages = 1_050_000
    buffer = free_memory(num_pages * PAGE_BYTES).view(torch.float8_e4m3fn).view(num_pages, 1, PAGE_BYTES)
    src, dst, shifts = torch.tensor([67_199_998, 3]), torch.tensor([4, 67_199_999]), torch.tensor([9, -9])
    rope, raw = make_rope(64, is_neox=True), torch.randn(2, KEY_DIM)
    write(buffer, src, stored(raw, torch.tensor([0, 9]), rope, is_mixed=True))
    splice_index([buffer], src, dst, shifts, rope, is_mixed=True)
    there = stored(raw, torch.tensor([9, 0]), rope, is_mixed=True)
    assert relative_l2(read_keys(buffer, dst), there) <= INDEX_REL_L2


def test_empty_input_and_operands_outside_the_contract() -> None:
    none, one, rope = torch.empty(0, dtype=torch.int64), torch.tensor([1]), make_rope(64, is_neox=True)
    buffer = torch.zeros(2, 1, PAGE_BYTES).to(torch.float8_e4m3fn)
    splice_index([buffer], none, none, none, rope, is_mixed=True)
    assert not buffer.view(torch.uint8).any()
    for pages_, slot, other, match in (
        (buffer[..., :-16].contiguous(), one, rope, "pages have shape"),
        (buffer, one + 127, rope, "must be in"),
        (buffer, one, make_rope(48, is_neox=True), "power of two"),
        (buffer, one, make_rope(256, is_neox=True), "rotary part"),
    ):
        with pytest.raises(ValueError, match=match):
            splice_index([pages_], one - 1, slot, one, other, is_mixed=True)
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        splice_index([torch.zeros(2, 1, PAGE_BYTES)], one - 1, one, one, rope, is_mixed=True)


@pytest.mark.parametrize("form", FORMS)
def test_it_compiles_for_a_gpu_without_spills(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For sm_90, without a device; products are fused with sums whatever Triton's default is."""
    pytest.importorskip("triton")
    from triton import knobs

    monkeypatch.setattr(knobs.language, "default_fp_fusion", False)

    load_kernels(interpreted=False)
    from pic_kernels import triton_index

    is_neox, is_mixed = FORMS[form]
    constants = (64, is_neox, is_mixed, *triton_index._CONSTANTS)
    compiled = compile_for_gpu(triton_index._splice_index_kernel, constants)
    assert compiled.metadata.enable_fp_fusion
    code = read_machine_code(compiled)
    assert code.stack_bytes == 0
    assert code.threads_per_sm >= 384
    # Keys in 16 bytes at a time, scales in 4.
    assert set(code.row_stores) == {16, 4}
    assert 16 in code.row_loads
