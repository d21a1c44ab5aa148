"""`splice_mha`: every implementation against the reference and against float64, over layouts and slots."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pic_kernels import RopeParams, splice_mha
from pic_kernels.numerics import MAX_TESTED_SHIFT, ROTATE_REL_L2, relative_l2
from splice_cases import Slots, bits_of, make_rope, pages, poison, random_rows, rotate_exact, scattered, spans

DTYPES = tuple(ROTATE_REL_L2)
BACKENDS = ("host", "device", "reference")

SLOTS = {
    "one token": scattered(1, torch.tensor([5])),
    "two spans, two shifts": spans([40, 70], [12, -9]),
    "a span that does not move": spans([50, 33, 40], [0, 7, 0]),
    "short spans": spans([3, 1, 7, 31], [4, 4, -4, 0]),
    "short and long spans": spans([3, 64, 2, 45, 1], [1, 2, 3, 3, 0]),
    "one long span": spans([3000], [1021]),
    "scattered, one shift": scattered(77, torch.full((77,), -13)),
    "scattered, a shift each": scattered(77, torch.arange(77) - 30),
    "pages of 16": pages(5, 16, 48),
}


def _buffers(
    slots: Slots, dtype: torch.dtype, heads: int, head_dim: int, *, layers: int = 2, v_head_dim: int | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    dims = (head_dim, v_head_dim or head_dim)
    k_buffers, v_buffers = (
        [random_rows((slots.num_slots, heads, dim), dtype, seed=10 * layer + kind) for layer in range(layers)]
        for kind, dim in enumerate(dims)
    )
    for buffer in (*k_buffers, *v_buffers):
        poison(buffer, slots.dst)
    return k_buffers, v_buffers


def _check(slots: Slots, dtype: torch.dtype, heads: int, head_dim: int, rope: RopeParams, *, layers: int = 2) -> None:
    """Splice and compare with float64; bytes outside the target rows must be what they were."""
    k_buffers, v_buffers = _buffers(slots, dtype, heads, head_dim, layers=layers)
    before = [bits_of(buffer).clone() for buffer in (*k_buffers, *v_buffers)]
    splice_mha(k_buffers, v_buffers, slots.src, slots.dst, slots.shifts, rope)
    others = torch.ones(slots.num_slots, dtype=torch.bool)
    others[slots.dst] = False
    still = slots.shifts == 0
    part = rope.rotary_dim
    for buffer, old in zip((*k_buffers, *v_buffers), before, strict=True):
        assert torch.equal(bits_of(buffer)[others], old[others])
    for buffer, old in zip(v_buffers, before[layers:], strict=True):
        assert torch.equal(bits_of(buffer)[slots.dst], old[slots.src])
    for buffer, old in zip(k_buffers, before[:layers], strict=True):
        new = bits_of(buffer)[slots.dst]
        assert torch.equal(new[still], old[slots.src[still]])
        assert torch.equal(new[..., part:], old[slots.src][..., part:])
        if still.all():
            continue
        donors = old[slots.src].view(dtype)[~still][..., :part]
        exact = rotate_exact(donors, slots.shifts[~still], rope)
        assert relative_l2(new.view(dtype)[~still][..., :part], exact) <= ROTATE_REL_L2[dtype]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SGLANG_PIC_KERNELS", request.param)
    return str(request.param)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SLOTS)
def test_slots_and_dtypes(case: str, dtype: torch.dtype) -> None:
    _check(SLOTS[case], dtype, heads=3, head_dim=16, rope=make_rope(16, is_neox=True))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("heads", "head_dim", "is_neox", "part"),
    list(product((1, 2, 5, 8), (64, 128), (True, False), (1.0, 0.5, 0.25))),
)
def test_layouts(heads: int, head_dim: int, is_neox: bool, part: float) -> None:
    """Any number of KV heads, both pair layouts, the whole head or a part of it rotary."""
    rope = make_rope(int(head_dim * part), is_neox=is_neox)
    for case in ("short and long spans", "scattered, a shift each"):
        _check(SLOTS[case], torch.bfloat16, heads, head_dim, rope, layers=1)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("head_dim", [6, 10, 80, 96])
def test_odd_sizes(head_dim: int) -> None:
    """Rows that are no multiple of eight bytes, and a rotary part that is no power of two."""
    for is_neox in (True, False):
        _check(SLOTS["short and long spans"], torch.bfloat16, 1, head_dim, make_rope(head_dim - 4, is_neox=is_neox))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_far_shifts(dtype: torch.dtype) -> None:
    far = MAX_TESTED_SHIFT
    slots = scattered(90, torch.tensor([far, -far, far - 1] * 30, dtype=torch.int32))
    _check(slots, dtype, heads=2, head_dim=64, rope=make_rope(64, is_neox=True, base=500_000.0))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("is_neox", [True, False])
def test_backends_agree_with_the_reference(is_neox: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 to the last bits; a fused multiply-add rounds once less."""
    slots, rope = SLOTS["scattered, a shift each"], make_rope(64, is_neox=is_neox)
    here, there = _buffers(slots, torch.float32, 4, 64), _buffers(slots, torch.float32, 4, 64)
    splice_mha(*here, slots.src, slots.dst, slots.shifts, rope)
    monkeypatch.setenv("SGLANG_PIC_KERNELS", "reference")
    splice_mha(*there, slots.src, slots.dst, slots.shifts, rope)
    for left, right in zip((*here[0], *here[1]), (*there[0], *there[1]), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("backend")
def test_there_and_back_is_the_composed_shift() -> None:
    """R(b) R(a) = R(a + b), through the pool."""
    rope = make_rope(64, is_neox=True)
    n = 40
    slots = [torch.arange(n) + n * i for i in range(4)]
    k_buffer, v_buffer = random_rows((4 * n, 2, 64), torch.float32), random_rows((4 * n, 2, 64), torch.float32, seed=1)
    for src, dst, shift in ((0, 1, 900), (1, 2, -1_234), (0, 3, -334)):
        splice_mha([k_buffer], [v_buffer], slots[src], slots[dst], torch.full((n,), shift), rope)
    assert relative_l2(k_buffer[slots[2]], k_buffer[slots[3]]) <= ROTATE_REL_L2[torch.float32]


@pytest.mark.usefixtures("backend")
def test_values_may_be_narrower_than_keys() -> None:
    slots, rope = SLOTS["short and long spans"], make_rope(32, is_neox=True)
    k_buffers, v_buffers = _buffers(slots, torch.float16, 2, 32, v_head_dim=24)
    splice_mha(k_buffers, v_buffers, slots.src, slots.dst, slots.shifts, rope)
    for buffer in v_buffers:
        assert torch.equal(buffer[slots.dst], buffer[slots.src])


@pytest.mark.usefixtures("backend")
def test_empty_input_writes_nothing() -> None:
    rope, none = make_rope(8, is_neox=True), torch.empty(0, dtype=torch.int64)
    buffer = random_rows((4, 1, 8), torch.float32)
    before = buffer.clone()
    splice_mha([buffer], [buffer.clone()], none, none, none, rope)
    assert torch.equal(buffer, before)


@st.composite
def _random_slots(draw: st.DrawFn) -> Slots:
    n = draw(st.integers(1, 90))
    num_slots = 2 * n + draw(st.integers(0, 9))
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**16))))
    if draw(st.booleans()):
        # Mostly running on: swap a few slots of an ordered pool.
        order = torch.arange(num_slots)
        for _ in range(draw(st.integers(0, 5))):
            i, j = draw(st.tuples(*[st.integers(0, num_slots - 1)] * 2))
            order[[i, j]] = order[[j, i]]
    pool = draw(st.lists(st.integers(-MAX_TESTED_SHIFT, MAX_TESTED_SHIFT) | st.just(0), min_size=1, max_size=4))
    edges = sorted(draw(st.lists(st.integers(0, n), max_size=6)))
    shifts = torch.full((n,), pool[0])
    for index, edge in enumerate(edges):
        shifts[edge:] = pool[index % len(pool)]
    return Slots(num_slots, order[:n].clone(), order[n : 2 * n].clone(), shifts)


@settings(max_examples=150, deadline=None)
@given(
    slots=_random_slots(),
    heads=st.integers(1, 5),
    half=st.integers(1, 12),
    rest=st.integers(0, 9),
    is_neox=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_slots_shapes_and_shifts(
    slots: Slots, heads: int, half: int, rest: int, is_neox: bool, dtype: torch.dtype
) -> None:
    """The CPU path over arbitrary permutations, spans, shifts and row widths."""
    _check(slots, dtype, heads, 2 * half + rest, make_rope(2 * half, is_neox=is_neox), layers=1)


def _operands() -> dict[str, object]:
    buffers = {name: [torch.zeros(8, 1, 4)] for name in ("k_buffers", "v_buffers")}
    index = {"src": torch.tensor([0, 1]), "dst": torch.tensor([4, 5]), "shifts": torch.tensor([1, 1])}
    return {**buffers, **index, "rope": make_rope(4, is_neox=True)}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"dst": torch.tensor([1, 5])}, ValueError, "share 1 slots"),
        ({"dst": torch.tensor([5, 5])}, ValueError, "names a slot twice"),
        ({"dst": torch.tensor([5, 8])}, ValueError, r"dst holds slots in \[5, 8\]"),
        ({"src": torch.tensor([-1, 1])}, ValueError, "src holds slots"),
        ({"src": torch.tensor([1])}, ValueError, "with one n"),
        ({"src": torch.tensor([0, 1], dtype=torch.int32)}, TypeError, "src.dtype"),
        ({"shifts": torch.tensor([1.0, 1.0])}, TypeError, "shifts.dtype"),
        ({"rope": make_rope(6, is_neox=True)}, ValueError, "rotary part"),
        ({"k_buffers": []}, ValueError, "empty"),
        ({"k_buffers": [torch.zeros(8, 1, 4, dtype=torch.float64)]}, TypeError, "k_buffers"),
        ({"k_buffers": [torch.zeros(8, 4)]}, ValueError, "contiguous"),
        ({"k_buffers": [torch.zeros(8, 1, 8)[..., ::2]]}, ValueError, "contiguous"),
        ({"v_buffers": [torch.zeros(9, 1, 4)]}, ValueError, "must agree"),
        ({"v_buffers": [torch.zeros(8, 1, 4), torch.zeros(8, 2, 4)]}, ValueError, "must be like"),
    ],
)
def test_operands_outside_the_contract_are_refused(
    changes: dict[str, object], error: type[Exception], match: str
) -> None:
    operands = {**_operands(), **changes}
    with pytest.raises(error, match=match):
        splice_mha(*operands.values())  # type: ignore[arg-type]
    for name in ("k_buffers", "v_buffers"):
        assert all(not buffer.any() for buffer in operands[name])  # type: ignore[attr-defined]


def test_unknown_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PIC_KERNELS", "fast")
    with pytest.raises(ValueError, match="SGLANG_PIC_KERNELS='fast'"):
        splice_mha(*_operands().values())  # type: ignore[arg-type]


@pytest.mark.parametrize("kwargs", [{"rotary_dim": 3}, {"rotary_dim": 0}, {"rotary_dim": 8}])
def test_rope_params_are_checked(kwargs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"rotary_dim|inv_freq"):
        RopeParams(inv_freq=torch.ones(2), is_neox_style=True, **kwargs)
