"""`splice_rows`: every implementation against the reference and against float64, over layouts and slots."""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pic_bench.gpu.kernel_pool import exact_turn
from pic_kernels import LayerBuffers, Source, splice_rows
from pic_kernels.numerics import MAX_TESTED_SHIFT, ROTATE_REL_L2, relative_l2

from tests.helpers.splice_cases import (
    FAR,
    SLOTS,
    Slots,
    Target,
    aligned_heads,
    bits_of,
    check_splice,
    free_memory,
    fused,
    make_buffers,
    make_rope,
    on_cpu,
    random_rows,
    scattered,
)

DTYPES = tuple(ROTATE_REL_L2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SLOTS)
def test_slots_and_dtypes(target: Target, case: str, dtype: torch.dtype) -> None:
    slots = target.sized(SLOTS[case]) if case == "one long span" else SLOTS[case]
    check_splice(target.device, slots, dtype, 3, (16, 16), make_rope(16, is_neox=True))


# Every width, layout and part together, and every number of heads with each of them.
_LAYOUTS = [*zip(product((64, 128), (True, False), (1.0, 0.5, 0.25)), cycle((1, 2, 5, 8)), strict=False)]


@pytest.mark.parametrize(("layout", "heads"), _LAYOUTS)
def test_layouts(target: Target, layout: tuple[int, bool, float], heads: int) -> None:
    """Any number of KV heads, both pair layouts, the whole head or a part of it rotary."""
    head_dim, is_neox, part = layout
    rope = make_rope(int(head_dim * part), is_neox=is_neox)
    for case in ("short and long spans", "scattered, a shift each"):
        slots = target.sized(SLOTS[case])
        check_splice(target.device, slots, torch.bfloat16, heads, (head_dim, head_dim), rope, layers=1)


_SHORT = SLOTS["short and long spans"]
_SHAPES = [
    # What models have beside 64 and 128, with values of another width.
    *((scattered(5, torch.arange(5) - 2), DTYPES, (dim, 64), dim, 1) for dim in (72, 80, 112, 192, 256)),
    # Rows that are no multiple of eight bytes, and a rotary part that is no power of two.
    *((_SHORT, (torch.bfloat16,), (dim, dim), dim - 4, 2) for dim in (6, 10, 80, 96)),
    # The fused kernels move several layers in one program; the last one may have fewer.
    *((scattered(3, torch.tensor([0, 8, -8])), (torch.bfloat16,), (32, 32), 32, layers) for layers in (1, 3, 4, 9)),
    (FAR, DTYPES, (64, 64), 64, 2),
]


@pytest.mark.parametrize(("slots", "dtypes", "dims", "rotary_dim", "layers"), _SHAPES)
def test_widths_layers_and_far_shifts(
    target: Target, slots: Slots, dtypes: tuple[torch.dtype, ...], dims: tuple[int, int], rotary_dim: int, layers: int
) -> None:
    for dtype, is_neox in product(dtypes, (True, False)):
        heads = max(2, aligned_heads(dims[0], dtype)) if target.is_fused else 2
        rope = make_rope(rotary_dim, is_neox=is_neox, base=500_000.0)
        check_splice(target.device, target.sized(slots), dtype, heads, dims, rope, layers=layers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_read_from_other_memory(target: Target, dtype: torch.dtype) -> None:
    """As within one pool that holds both: slots of the source are its own, and there may be more of them."""
    slots, rope = scattered(40, torch.arange(40) - 20), make_rope(16, is_neox=True).to(target.device)
    num_slots = slots.num_slots
    for dims in ((32, 32), (32,)):
        held = make_buffers(slots, dtype, 2, dims, 2)
        pools = [torch.cat([buffer, torch.zeros_like(buffer[:50])]).to(target.device) for buffer in held]
        split = [(pool[:num_slots].clone(), pool[num_slots:].clone()) for pool in pools]
        src, dst, shifts = slots.src.to(target.device), torch.arange(5, 45, device=target.device), slots.shifts
        shifts = shifts.to(target.device)
        source = Source(*(LayerBuffers([old for old, _ in part]) for part in (split[:2], split[2:]) if part))
        keys, values = ([new for _, new in part] for part in (split[:2], split[2:]))
        splice_rows(pools[:2], pools[2:] or None, src, dst + num_slots, shifts, rope)
        splice_rows(keys, values or None, src, dst, shifts, rope, source=source)
        for pool, (_, new) in zip(pools, split, strict=True):
            assert torch.equal(bits_of(pool[num_slots:]), bits_of(new))
        fewer = Source(LayerBuffers([held[0][:, :1].clone()] * 2))
        with pytest.raises(ValueError, match="layers, heads, dimensions and dtype must agree"):
            splice_rows(keys, None, src, dst, shifts, rope, source=fewer)


def test_empty_input_writes_nothing(target: Target) -> None:
    rope, none = make_rope(8, is_neox=True), torch.empty(0, dtype=torch.int64)
    buffer = random_rows((4, 1, 12), torch.float32)
    before = buffer.clone()
    splice_rows([buffer], [buffer.clone()], none, none, none, rope)
    splice_rows([buffer], None, none, none, none, rope, rope_offset=4)
    assert torch.equal(buffer, before)


@on_cpu
@pytest.mark.parametrize("is_neox", [True, False])
def test_offsets_beyond_32_bits(target: Target, is_neox: bool) -> None:
    """Slots whose bytes, 4-byte words and elements are further than 2^31 from the buffer's start."""
    row_bytes, slots = 64 * 256 * 2, torch.tensor([2, 70_000, 140_000, 299_000, 299_999])
    k_buffer, v_buffer = (free_memory(300_000 * row_bytes).view(torch.bfloat16).view(-1, 64, 256) for _ in range(2))
    for buffer in (k_buffer, v_buffer):
        buffer[slots] = random_rows((5, 64, 256), torch.bfloat16)
    src, dst, shifts = slots[[1, 3]], slots[[4, 2]], torch.tensor([-7, 11])
    rope = make_rope(256, is_neox=is_neox)
    splice_rows([k_buffer], [v_buffer], src, dst, shifts, rope)
    assert torch.equal(v_buffer[dst], v_buffer[src])
    assert relative_l2(k_buffer[dst], exact_turn(k_buffer[src], shifts, rope)) <= ROTATE_REL_L2[torch.bfloat16]


@st.composite
def _random_slots(draw: st.DrawFn, max_tokens: int) -> Slots:
    n = draw(st.integers(1, max_tokens))
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


@settings(max_examples=100)
@given(
    slots=_random_slots(90),
    heads=st.integers(1, 5),
    sizes=st.tuples(st.integers(1, 12), st.integers(0, 9), st.integers(1, 600)),
    is_neox=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_slots_shapes_and_shifts(
    slots: Slots, heads: int, sizes: tuple[int, int, int], is_neox: bool, dtype: torch.dtype
) -> None:
    """The CPU path over arbitrary permutations, spans, shifts and row widths: values of one byte to kilobytes."""
    half, rest, v_head_dim = sizes
    rope = make_rope(2 * half, is_neox=is_neox)
    check_splice("cpu", slots, dtype, heads, (2 * half + rest, v_head_dim), rope, layers=1)


@fused
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    # The interpreter runs a block of lanes in a millisecond.
    slots=_random_slots(24),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 12), st.integers(0, 4), st.integers(1, 9)),
    layers=st.integers(1, 5),
    is_neox=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_operands_of_the_fused_kernel(
    target: Target, slots: Slots, sizes: tuple[int, int, int, int], layers: int, is_neox: bool, dtype: torch.dtype
) -> None:
    """The same, where rows are whole 16 bytes: halves, heads and holes of any width within them."""
    heads, half, rest, v_head_dim = sizes
    head_dim = 2 * half + (rest if is_neox else 2 * rest)
    heads *= max(aligned_heads(dim, dtype) for dim in (head_dim, v_head_dim))
    rope = make_rope(2 * half, is_neox=is_neox)
    check_splice(target.device, slots, dtype, heads, (head_dim, v_head_dim), rope, layers=layers)


def _operands() -> dict[str, object]:
    buffers = {name: [torch.zeros(8, 1, 4)] for name in ("keys", "values")}
    index = {"src": torch.tensor([0, 1]), "dst": torch.tensor([4, 5]), "shifts": torch.tensor([1, 1])}
    return {**buffers, **index, "rope": make_rope(4, is_neox=True)}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"dst": torch.tensor([1, 5])}, ValueError, "share 1 slots"),
        ({"dst": torch.tensor([5, 5])}, ValueError, "names a slot twice"),
        ({"dst": torch.tensor([5, 8])}, ValueError, r"dst holds slots in \[5, 8\]"),
        ({"src": torch.tensor([1])}, ValueError, "with one n"),
        ({"src": torch.tensor([0, 1], dtype=torch.int32)}, TypeError, "src.dtype"),
        ({"rope": make_rope(6, is_neox=True)}, ValueError, "rotary part"),
        ({"keys": [torch.zeros(8, 1, 4, dtype=torch.float64)]}, TypeError, "keys"),
        ({"keys": [torch.zeros(8, 1, 8)[..., ::2]]}, ValueError, "contiguous"),
        ({"values": [torch.zeros(8, 1, 4), torch.zeros(8, 2, 4)]}, ValueError, r"values\[1\] is .* must be like"),
    ],
)
def test_operands_outside_the_contract_are_refused(
    changes: dict[str, object], error: type[Exception], match: str
) -> None:
    operands = {**_operands(), **changes}
    with pytest.raises(error, match=match):
        splice_rows(*operands.values())  # type: ignore[arg-type]
    for name in ("keys", "values"):
        assert all(not buffer.any() for buffer in operands[name])  # type: ignore[attr-defined]
