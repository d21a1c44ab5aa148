"""The start-up check on real rows of a small model of our own, and the slots that start-up checks borrow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from pic_kernels import RopeParams
from torch import Tensor

from sglang_pic.adapter.probe.borrowed_slots import borrow_slots
from sglang_pic.errors import ContractError, UnsupportedError
from sglang_pic.runtime import RopeGeometry, read_geometry, view_pool
from sglang_pic.runtime.checks.moved_rows import (
    ROW_LIMITS,
    RowErrors,
    RowSlots,
    checked_shifts,
    judge_rows,
    measure_rows,
)
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.views import PoolKind, PoolView
from tests.helpers import rope_models as models

NUM_TOKENS = 20
NUM_LAYERS = 3
CONTEXT = 2_048
DTYPES = (torch.float32, torch.bfloat16)
KINDS = tuple(PoolKind)
Change = Callable[[RopeParams], RopeParams]


def _turned(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda rope: dataclasses.replace(rope, inv_freq=change(rope.inv_freq))


WRONG: dict[str, Change] = {
    "base off by a hundredth": _turned(lambda freqs: freqs * 1.01 ** -torch.linspace(0, 1, len(freqs))),
    "layout": lambda rope: dataclasses.replace(rope, is_neox_style=not rope.is_neox_style),
    "linear scaling": _turned(lambda freqs: freqs / 1.1),
    "one frequency": _turned(lambda freqs: torch.cat((freqs[:3], freqs[3:4] * 1.5, freqs[4:]))),
    "sign": _turned(torch.neg),
}


def replace_rope(geometry: RopeGeometry, change: Change, layers: tuple[int, ...]) -> RopeGeometry:
    """`geometry` with the rotation of some layers changed."""
    params = (change(rope) if layer in layers else rope for layer, rope in enumerate(geometry.params))
    return dataclasses.replace(geometry, params=tuple(params))


class Model:
    """Layers of causal attention with RoPE over 16 dimensions, float32 inside, rows kept in the pool's dtype."""

    def __init__(self, kind: PoolKind, dtype: torch.dtype, *, is_neox: bool = True) -> None:
        self.rotary = models.RotaryEmbedding(is_neox_style=is_neox, num_positions=CONTEXT)
        pool = models.MLATokenToKVPool if kind is PoolKind.MLA else models.MHATokenToKVPool
        self.view: PoolView = view_pool(pool(size=100, dtype=dtype))
        self.geometry = read_geometry(models.make_llama(NUM_LAYERS, self.rotary), max_shift=CONTEXT)
        draw = torch.Generator().manual_seed(3)
        rest = self.view.keys[0].shape[2] - 16 if kind is PoolKind.MLA else 16
        self.weights = [
            [torch.randn(32, out, generator=draw) / 32**0.5 for out in (16, 16, rest)] for _ in range(NUM_LAYERS)
        ]
        self.inputs = torch.randn(NUM_TOKENS, 32, generator=draw)
        self.position_dependent = 0.0
        self.noise = 0.0
        """Relative L2 that a layer's output gets, drawn anew in every pass."""
        self.still: tuple[int, ...] = ()
        """Layers that do not turn their keys, whatever the geometry says."""
        self.num_flipped = 0
        """Tokens whose layer output is another one altogether, others in every pass: they chose another expert."""
        self._draw = torch.Generator().manual_seed(5)

    def compute(self, slots: Tensor, position: int) -> None:
        """The rows of the token sequence from `position` on."""
        hidden, positions = self.inputs, torch.arange(NUM_TOKENS) + position
        mask = torch.full((NUM_TOKENS, NUM_TOKENS), -torch.inf).triu(1)
        for layer, weights in enumerate(self.weights):
            query, key, value = (hidden @ weight for weight in weights)
            value = value + self.position_dependent * position
            if layer not in self.still:
                query, key = (x[:, 0] for x in self.rotary.forward_native(positions, query[:, None], key[:, None]))
            if self.view.kind is PoolKind.MLA:
                self.view.keys[layer][slots] = torch.cat((value, key), dim=1)[:, None].to(self.view.dtype)
                row = self.view.keys[layer][slots, 0].float()
                value, key = row[:, :-16], row[:, -16:]
            else:
                for buffer, rows in ((self.view.keys[layer], key), (self.view.values[layer], value)):
                    buffer[slots] = rows[:, None].expand(-1, 2, -1).to(self.view.dtype)
                value, key = (buffer[layer][slots, 0].float() for buffer in (self.view.values, self.view.keys))
            scores = (query @ key.T + mask).softmax(-1)
            hidden = self._disturb(torch.nn.functional.pad(scores @ value, (0, 32 - value.shape[1])) + hidden)

    def _disturb(self, hidden: Tensor) -> Tensor:
        other = torch.randn(hidden.shape, generator=self._draw) * hidden.std()
        flipped = torch.randperm(NUM_TOKENS, generator=self._draw)[: self.num_flipped]
        hidden = hidden + self.noise * other
        hidden[flipped] = other[flipped]
        return hidden

    def check(
        self, geometry: RopeGeometry | None = None, compute: Callable[[Tensor, int], None] | None = None
    ) -> RowErrors:
        """The whole check, as at start-up."""
        shifts = checked_shifts(CONTEXT, NUM_TOKENS)
        slots = RowSlots(*(torch.arange(NUM_TOKENS) + 1 + 30 * number for number in range(3)))
        splicer = Splicer(self.view, geometry or self.geometry)
        errors = measure_rows(splicer, compute or self.compute, slots, shifts)
        return judge_rows(errors, self.view, shifts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_neox", [True, False])
def test_a_healthy_model_passes_far_below_the_limits(kind: PoolKind, dtype: torch.dtype, is_neox: bool) -> None:
    """Keys that were not moved would not."""
    errors = Model(kind, dtype, is_neox=is_neox).check()
    limits = ROW_LIMITS[dtype]
    assert errors.first_keys < limits.first / 3
    assert max(errors.keys, errors.rest) < limits.deeper / 3
    assert errors.unmoved_keys > 2 * limits.deeper


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rotation_stops(name: str, kind: PoolKind, dtype: torch.dtype) -> None:
    model = Model(kind, dtype)
    wrong = replace_rope(model.geometry, WRONG[name], tuple(range(NUM_LAYERS)))
    with pytest.raises(ContractError, match=r"^layer 0: keys moved by -?\d+ positions .* L2 of .*; allowed is "):
        model.check(wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", [0, 0.15])
@pytest.mark.parametrize("name", ["layout", "linear scaling", "sign"])
def test_one_wrong_layer_is_named_among_noisy_ones(kind: PoolKind, noise: float, name: str) -> None:
    """What is off in that layer's keys alone does not come from the layers before."""
    model = Model(kind, torch.bfloat16)
    model.noise = noise
    with pytest.raises(ContractError, match=r"^layer 2: keys moved by"):
        model.check(replace_rope(model.geometry, WRONG[name], (2,)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", [0, 0.15])
@pytest.mark.parametrize("still", [(0,), (2,), (0, 1)])
def test_layers_that_do_not_turn_are_found(kind: PoolKind, noise: float, still: tuple[int, ...]) -> None:
    """A layer whose rotation was read wrongly is none of them; and where none turns, positions were not heeded."""
    model = Model(kind, torch.bfloat16)
    model.noise, model.still = noise, still
    found = model.check()
    assert found.unrotated_layers == still
    assert found.unmoved_keys > 0.5
    turning = ({0, 1, 2} - set(still)).pop()
    with pytest.raises(ContractError, match=rf"^layer {turning}: keys moved by"):
        model.check(replace_rope(model.geometry, WRONG["sign"], (turning,)))
    model.still = (0, 1, 2)
    with pytest.raises(ContractError, match=r"^layer 0: keys moved by"):
        model.check()


@pytest.mark.parametrize(("kind", "rest"), [(PoolKind.MHA, "values"), (PoolKind.MLA, "latent rows")])
def test_rows_that_depend_on_the_position_otherwise_are_refused(kind: PoolKind, rest: str) -> None:
    model = Model(kind, torch.float32)
    model.position_dependent = 0.01
    refusal = rf"with this model: it depends on absolute .*\({rest} of layer 0, computed 1 positions away"
    with pytest.raises(UnsupportedError, match=refusal):
        model.check()


@pytest.mark.parametrize("what", ["nothing", "NaN"])
def test_a_model_that_writes_no_rows_does_not_pass(what: str) -> None:
    """Nothing compared with nothing is no agreement."""
    model = Model(PoolKind.MHA, torch.float32)

    def compute(slots: Tensor, _position: int) -> None:
        if what == "NaN":
            for buffer in (*model.view.keys, *model.view.values):
                buffer[slots] = torch.nan

    with pytest.raises(ContractError, match="relative L2 of inf"):
        model.check(compute=compute)


@pytest.fixture(params=[1, 16])
def view(request: pytest.FixtureRequest) -> PoolView:
    return view_pool(models.MHATokenToKVPool(size=96, page_size=request.param, dtype=torch.bfloat16))


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_saved_and_no_garbage_is_left(view: PoolView, *, fails: bool) -> None:
    """Rows are empty afterwards, whatever was in the pool before: nobody owns them, and a NaN would spread."""
    row, buffers = torch.arange(50, dtype=torch.int32), (*view.keys, *view.values)
    with borrow_slots(view, 3, 20, row) as slots:
        borrowed = torch.cat(slots)
    before = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        buffer[borrowed[:7]] = float("nan")
    with pytest.raises(RuntimeError) if fails else nullcontext(), borrow_slots(view, 3, 20, row) as slots:
        assert torch.equal(torch.cat(slots), borrowed)
        row[:20] = 99
        for buffer in buffers:
            buffer[borrowed] = float("nan")
        if fails:
            raise RuntimeError
    assert row.tolist() == list(range(50))
    for buffer, old in zip(buffers, before, strict=True):
        assert not buffer[borrowed].any()
        others = torch.ones(len(buffer), dtype=torch.bool)
        others[borrowed] = False
        assert torch.equal(buffer[others], old[others])
