"""The compiled loops of the CPU path: the results of the way in torch, and no harm where they cannot be had."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pic_native
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pic_kernels import LayerBuffers, RopeParams, host, host_native
from pic_kernels.numerics import ROTATE_REL_L2, relative_l2
from pic_kernels.slots import check_slots
from splice_cases import bits_of, make_rope, poison, random_rows, scattered

SWITCH = "SGLANG_PIC_HOST"


Rows = list[torch.Tensor]


@pytest.fixture
def native() -> host_native.NativeRows:
    loaded = host_native.load()
    if loaded is None:
        pytest.skip("no C compiler, or the compiled loops are switched off")
    return loaded


@pytest.fixture
def _unloaded() -> Iterator[None]:
    """The library is looked for again, in the test and after it."""
    host_native._load.cache_clear()
    yield
    host_native._load.cache_clear()


def turn(
    buffers: Rows, src: torch.Tensor, dst: torch.Tensor, shifts: torch.Tensor, rope: RopeParams, at: int = 0
) -> None:
    """Move rows whose dimensions from `at` on turn, with nothing copied along."""
    host.move_rows(LayerBuffers(buffers), None, src, dst, shifts, rope, at)


def both_ways(buffers: Rows, move: Callable[[Rows], object]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each buffer after `move(buffers)`, compiled and in torch."""
    results = []
    for way in ("auto", "torch"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SWITCH, way)
            copies = [buffer.clone() for buffer in buffers]
            move(copies)
            results.append(copies)
    return zip(*results, strict=True)


# Rows of whole cache lines, the second beside its rotary part; the third is no multiple of a line, the last is larger
# than what is turned at once.
_LARGE = {"lines": (2, 32, 0), "latent": (1, 96, 64), "odd": (3, 44, 2), "huge": (80, 128, 0)}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ROTATE_REL_L2, ids=str)
@pytest.mark.parametrize("case", _LARGE)
@pytest.mark.parametrize("misaligned", [0, 1])
def test_large_moves_are_equal_to_torchs(case: str, dtype: torch.dtype, misaligned: int) -> None:
    """Large enough to be written past the caches, where rows are whole lines: keys, values, rows that do not turn."""
    heads, dim, offset = _LARGE[case]
    n = 60 if case == "huge" else 4_000
    shifts = (torch.arange(n) // 50 % 5 - 2) * 1_024
    slots, rope = scattered(n, shifts), make_rope(32, is_neox=case != "latent")
    count = slots.num_slots * heads * dim
    start = [random_rows((slots.num_slots, heads, dim), dtype, seed=seed) for seed in range(4)]
    for buffer in start:
        poison(buffer, slots.dst)

    def move(buffers: Rows) -> None:
        for index, buffer in enumerate(buffers):
            flat = torch.empty(count + 64, dtype=dtype)
            first = -flat.data_ptr() % 64 // dtype.itemsize + misaligned
            buffers[index] = flat[first : first + count].view_as(buffer).copy_(buffer)
        keys, values = LayerBuffers(buffers[:2]), LayerBuffers(buffers[2:])
        host.move_rows(keys, values, slots.src, slots.dst, shifts, rope, offset)

    untouched = torch.ones(slots.num_slots, dtype=torch.bool)
    untouched[slots.dst] = False
    for left, right in both_ways(start, move):
        assert not left[slots.dst].to(torch.float32).isnan().any()
        assert torch.equal(bits_of(left)[untouched], bits_of(right)[untouched])
        # Where torch was built without fused multiplication a tie may fall to the other side.
        differ = bits_of(left) != bits_of(right)
        assert differ.to(torch.float32).mean() <= 1e-3
        assert relative_l2(left[slots.dst], right[slots.dst]) <= ROTATE_REL_L2[dtype] / 2


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_every_value_is_widened_and_rounded_as_torch_does(dtype: torch.dtype, is_neox: bool) -> None:
    """All codes, with infinities, NaN and subnormals, beside ordinary partners: turned by none to three eighths and a
    little, which leaves ties, sums that overflow and sums that almost vanish."""
    codes = torch.arange(1 << 16).remainder(1 << 8 * dtype.itemsize).to(bits_of(torch.zeros(1, dtype=dtype)).dtype)
    partners = random_rows((codes.numel(), 2), torch.float32) * torch.tensor([0.01, 300.0])
    both = torch.stack((codes.view(dtype).to(torch.float32), partners[:, 0], partners[:, 1], partners[:, 0]), dim=-1)
    rows = both.view(-1, 1, 4).to(dtype)
    bits_of(rows)[:, 0, 0] = codes
    n = rows.shape[0]
    pool = torch.cat((rows, torch.zeros_like(rows)))
    rope = RopeParams(torch.tensor([math.pi / 4, 0.9e-3], dtype=torch.float64), 4, is_neox)
    src, dst = torch.arange(n), torch.arange(n, 2 * n)
    for shift in (1, 2, 3):
        shifts = torch.full((n,), shift)
        ((left, right),) = both_ways([pool], partial(turn, src=src, dst=dst, shifts=shifts, rope=rope))
        nan = left.to(torch.float32).isnan()
        assert torch.equal(nan, right.to(torch.float32).isnan())
        got, want = (bits_of(each).to(torch.int32) for each in (left, right))
        differ = (got != want) & ~nan
        assert differ.to(torch.float32).mean() <= 1e-3
        assert not (differ & ((got - want).abs() > 1) & (right.to(torch.float32).abs() > 1e-3)).any()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_token_is_turned_by_its_own_shift(dtype: torch.dtype) -> None:
    """Shifts that come one by one, come back, and agree in their low bits."""
    n = 6_000
    draw = torch.Generator().manual_seed(1)
    shifts = (torch.randint(-3, 4, (n,), generator=draw) * 1_024 + torch.randint(0, 40, (n,), generator=draw)).to(dtype)
    shifts[::7] = 0
    slots, rope = scattered(n, shifts), make_rope(16, is_neox=True)
    rows = random_rows((slots.num_slots, 1, 16), torch.float32)
    ((left, right),) = both_ways([rows], lambda each: turn(each, slots.src, slots.dst, shifts, rope))
    torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)
    assert torch.equal(left[slots.dst[::7]], rows[slots.src[::7]])


@pytest.mark.usefixtures("native")
@given(frequency=st.floats(1e-9, 50.0), shift=st.integers(-(2**24), 2**24))
@settings(max_examples=300)
def test_angles_are_those_of_rope_params(frequency: float, shift: int) -> None:
    """Cosine and sine of any shift, in every quadrant, to float32's last bit or the one beside it."""
    rope = RopeParams(torch.tensor([frequency], dtype=torch.float64), 2, True)
    rows = torch.tensor([1.0, 0.0, torch.nan, torch.nan]).view(2, 1, 2)
    shifts = torch.tensor([shift])
    turn([rows], torch.tensor([0]), torch.tensor([1]), shifts, rope)
    cos, sin = rope.cos_sin(shifts)
    torch.testing.assert_close(rows[1], torch.cat((cos, sin), dim=1), rtol=1.2e-7, atol=1e-9)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), num_slots=st.integers(1, 130))
def test_slots_hold_says_what_the_words_say(
    native: host_native.NativeRows, data: st.DataObject, num_slots: int
) -> None:
    slot = st.integers(-2, num_slots + 1) if data.draw(st.booleans()) else st.integers(0, num_slots - 1)
    dst = data.draw(st.lists(slot, max_size=12))
    src = data.draw(st.lists(slot, min_size=len(dst), max_size=len(dst)))
    holds = all(0 <= each < num_slots for each in src + dst)
    holds = holds and len(set(dst)) == len(dst) and not set(src) & set(dst)
    assert native.slots_hold(*(torch.tensor(each, dtype=torch.int64) for each in (src, dst)), num_slots) is holds


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("src", "dst"), [([0, 64], [64, 1]), ([0, 1], [99, 99]), ([0, 1], [2, 100]), ([-1, 0], [2, 3])]
)
def test_the_compiled_check_raises_what_the_one_in_torch_does(
    src: list[int], dst: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = torch.tensor(src), torch.tensor(dst)
    messages = []
    for way in ("auto", "torch"):
        monkeypatch.setenv(SWITCH, way)
        with pytest.raises(ValueError, match=r"slot") as caught:
            check_slots(*slots, 100)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_slots_of_a_pool_larger_than_memory_are_checked(native: host_native.NativeRows) -> None:
    """A bit per slot, of which only those that are named are touched."""
    far = 1 << 33
    one, other = torch.tensor([far - 1, 0]), torch.tensor([1, far - 2])
    assert native.slots_hold(one, other, far)
    assert not native.slots_hold(one, other.flip(0) + 1, far)


def test_threads_do_not_change_a_bit(native: host_native.NativeRows) -> None:
    slots, rope = scattered(2_100, torch.arange(2_100)), make_rope(64, is_neox=True)
    start = random_rows((slots.num_slots, 2, 64), torch.bfloat16)
    results, before = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            keys, values = LayerBuffers([start.clone()]), LayerBuffers([start.clone()])
            native.move_rows(keys, values, slots.src, slots.dst, slots.shifts, rope, 0)
            results.append(torch.cat((keys[0], values[0])))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_an_unknown_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "fast")
    with pytest.raises(ValueError, match="SGLANG_PIC_HOST='fast'"):
        host_native.load()


@pytest.mark.usefixtures("_unloaded")
@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_torch_does_it(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Missing or failing: one line in the log, and correct rows."""
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(pic_native, "cache_from_source", lambda name: str(tmp_path / Path(name).name))
    with caplog.at_level(logging.WARNING):
        assert host_native.load() is None
        assert host_native.load() is None
    assert len(caplog.records) == 1
    assert compiler in caplog.text
    rows = random_rows((8, 1, 4), torch.bfloat16)
    none = torch.zeros(2, dtype=torch.int64)
    turn([rows], torch.tensor([1, 5]), torch.tensor([2, 6]), none, make_rope(4, is_neox=True))
    assert torch.equal(rows[2], rows[1])


@pytest.mark.usefixtures("native", "_unloaded")
@pytest.mark.parametrize("folder", ["kept", "file", "file/inside"])
def test_the_library_is_kept_where_it_can_be(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be written to costs a compilation, nothing else."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(pic_native, "cache_from_source", lambda name: str(tmp_path / folder / Path(name).name))
    assert host_native.load() is not None
    kept = list(tmp_path.glob("kept/*.so*"))
    assert len(kept) == (1 if folder == "kept" else 0)
