"""The compiled loops of the CPU path: the results of the way in torch, and no harm where they cannot be had."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pic_kernels import LayerBuffers, host, host_native
from pic_kernels.numerics import MAX_TESTED_SHIFT, ROTATE_REL_L2, relative_l2
from splice_cases import bits_of, make_rope, poison, random_rows, scattered

SWITCH = "SGLANG_PIC_HOST"


@pytest.fixture
def native() -> host_native.NativeRows:
    loaded = host_native.load()
    if loaded is None:
        pytest.skip("no C compiler, or the compiled loops are switched off")
    return loaded


def both_ways(
    buffers: list[torch.Tensor], move: object, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The buffers after `move(buffers)`, compiled and in torch."""
    results = []
    for way in ("auto", "torch"):
        monkeypatch.setenv(SWITCH, way)
        copies = [buffer.clone() for buffer in buffers]
        move(copies)  # type: ignore[operator]
        results.append(copies)
    return results[0], results[1]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ROTATE_REL_L2, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 32), (3, 64), (1, 577), (8, 256)])
def test_copies_are_equal_bytes(shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one byte to several kilobytes, of no alignment."""
    slots = scattered(1_500, torch.zeros(1_500))
    buffers = [random_rows((slots.num_slots, *shape), dtype, seed=layer) for layer in range(2)]
    compiled, plain = both_ways(buffers, lambda each: host.copy_rows(each, slots.src, slots.dst), monkeypatch)
    for left, right in zip(compiled, plain, strict=True):
        assert torch.equal(bits_of(left), bits_of(right))


@settings(max_examples=120, deadline=None)
@given(
    n=st.integers(1, 60),
    seed=st.integers(0, 2**16),
    heads=st.integers(1, 4),
    half=st.integers(1, 70),
    before=st.integers(0, 9),
    after=st.integers(0, 5),
    is_neox=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_rotations_agree(
    n: int, seed: int, heads: int, half: int, before: int, after: int, is_neox: bool, dtype: torch.dtype
) -> None:
    """Any width, offset and alignment; everything beside the rotary part and every unmoved row bit for bit."""
    draw = torch.Generator().manual_seed(seed)
    shifts = torch.randint(-2, 3, (n,), generator=draw) * (MAX_TESTED_SHIFT // 2)
    slots, rope = scattered(n, shifts, seed=seed), make_rope(2 * half, is_neox=is_neox)
    buffer = random_rows((slots.num_slots, heads, before + 2 * half + after), dtype, seed=seed)
    poison(buffer, slots.dst)
    with pytest.MonkeyPatch.context() as patch:
        (left,), (right,) = both_ways(
            [buffer], lambda each: host.rotate_rows(each, slots.src, slots.dst, shifts, rope, offset=before), patch
        )
    turned = slice(before, before + 2 * half)
    moved = slots.dst[shifts != 0]
    for part in (left, right):
        bits_of(part)[moved, :, turned] += 0
    if moved.numel():
        assert relative_l2(left[moved, :, turned], right[moved, :, turned]) <= ROTATE_REL_L2[dtype] / 2
    left[moved, :, turned] = right[moved, :, turned] = 0
    assert torch.equal(bits_of(left), bits_of(right))


@pytest.mark.usefixtures("native")
def test_rounding_is_to_nearest_even_and_keeps_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter turn of pairs whose results are known: halves of an ulp, infinities, NaN with every payload bit set."""
    rope = make_rope(2, is_neox=True)
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.3895e38, 1e-40, 0.0, 1.0, -1.00390625])
    buffer = torch.zeros((2 * len(values), 1, 2), dtype=torch.bfloat16)
    buffer[: len(values), 0, 0] = values.to(torch.bfloat16)
    bits_of(buffer)[2] = 0x7FFF
    src, dst = torch.arange(len(values)), torch.arange(len(values)) + len(values)
    (left,), (right,) = both_ways(
        [buffer],
        lambda each: host.rotate_rows(each, src, dst, torch.full((len(values),), 7), rope, offset=0),
        monkeypatch,
    )
    assert torch.equal(left.isnan(), right.isnan())
    assert left[dst[2]].isnan().all()
    whole = ~left.isnan()
    torch.testing.assert_close(left[whole], right[whole], rtol=2**-7, atol=0)


def test_threads_do_not_change_a_bit(native: host_native.NativeRows) -> None:
    slots, rope = scattered(2_100, torch.arange(2_100)), make_rope(64, is_neox=True)
    start = random_rows((slots.num_slots, 2, 64), torch.bfloat16)
    which, angles = slots.shifts - 1, rope.cos_sin(slots.shifts + 1)
    results, before = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            rows = LayerBuffers([start.clone()])
            native.rotate_rows(rows, slots.src, slots.dst, which, angles, offset=0, is_neox=True)
            results.append(rows[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_an_unknown_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "fast")
    with pytest.raises(ValueError, match="SGLANG_PIC_HOST='fast'"):
        host_native.load()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_torch_does_it(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Missing or failing: one line in the log, and correct rows."""
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(host_native, "cache_from_source", lambda name: str(tmp_path / Path(name).name))
    host_native._load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert host_native.load() is None
            assert host_native.load() is None
        assert len(caplog.records) == 1
        assert compiler in caplog.text
        rows = random_rows((8, 1, 4), torch.bfloat16)
        host.copy_rows([rows], torch.tensor([1, 5]), torch.tensor([2, 6]))
        assert torch.equal(rows[2], rows[1])
    finally:
        host_native._load.cache_clear()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("folder", ["kept", "file", "file/inside"])
def test_the_library_is_kept_where_it_can_be(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be written to costs a compilation, nothing else."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(host_native, "cache_from_source", lambda name: str(tmp_path / folder / Path(name).name))
    host_native._load.cache_clear()
    try:
        assert host_native.load() is not None
        kept = list(tmp_path.glob("kept/*.so*"))
        assert len(kept) == (1 if folder == "kept" else 0)
    finally:
        host_native._load.cache_clear()
