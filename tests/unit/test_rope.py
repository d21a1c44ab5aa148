"""Which layers turn by what, and refusing what a shift cannot reproduce; `tests/adapter` reads SGLang's own modules."""

from __future__ import annotations

import pytest
import rope_models as models
import torch
from torch import nn

from sglang_pic.errors import ContractError, UnsupportedError
from sglang_pic.runtime import RopeGeometry, read_geometry


def _read(model: nn.Module) -> RopeGeometry:
    return read_geometry(model, max_shift=8_192)


def _rotary(name: str) -> nn.Module:
    return models.named(name, models.RotaryEmbedding)()


def _layer(rotary: nn.Module | None, layer_id: int = 1, **core: int) -> nn.Module:
    return models.Attention(rotary, models.RadixAttention(layer_id, **core))


def test_layers_that_differ_in_base_are_grouped() -> None:
    local, wide = models.RotaryEmbedding(base=1e4), models.RotaryEmbedding(base=1e6)
    again = models.RotaryEmbedding(base=1e4)
    geometry = _read(models.make_model(*map(_layer, (local, wide, again), range(3))))
    assert [indices for _, indices in geometry.groups()] == [[0, 2], [1]]
    for rotary, params in zip((local, wide, again), geometry.params, strict=True):
        assert models.rotation_error(rotary, params) < 1e-3


def test_layer_ids_are_those_of_the_attention() -> None:
    """A pipeline stage's need not begin at 0, and DeepSeek has an absorbed and an expanded attention with one id."""
    rotary = models.RotaryEmbedding()
    assert _read(models.make_model(_layer(rotary, 5), _layer(rotary, 4))).layer_ids == (4, 5)
    layer = models.Attention(rotary, models.RadixAttention(0), models.RadixAttention(0))
    assert _read(models.make_model(layer)).layer_ids == (0,)


def test_layers_with_windows_are_read() -> None:
    """A window is a matter of which rows are read; what a row holds turns as in any other layer."""
    rotary = models.RotaryEmbedding()
    model = models.make_model(*(_layer(rotary, i, sliding_window_size=w) for i, w in enumerate((4_095, -1))))
    assert [indices for _, indices in _read(model).groups()] == [[0, 1]]


def test_gemma3_turns_by_what_the_model_hands_down() -> None:
    """Its layers hold another embedding, which knows no scaling; those with windows are given one of their own."""
    model = models.make_gemma3(base=1e6, factor=8.0, base_of_windows=1e4)
    geometry = _read(model)
    assert geometry.layer_ids == (0, 1, 2)
    [(local, in_windows), (wide, others)] = geometry.groups()
    assert (in_windows, others) == ([0, 2], [1])
    exponents = torch.arange(0, 16, 2) / 16
    assert torch.allclose(local.inv_freq, 1e4**-exponents)
    assert torch.allclose(wide.inv_freq, 1e6**-exponents / 8)
    assert local.is_neox_style
    model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(UnsupportedError, match="Gemma3RotaryEmbedding of rope_type 'dynamic': its frequencies"):
        _read(model)
    model.rotary_emb.rope_type = "linear"
    model.rotary_emb.angle_factor = 1.1
    with pytest.raises(ContractError, match=r"Gemma3RotaryEmbedding: the table of angles differs .* position 1000"):
        _read(model)


HUNYUAN = models.named("HunYuanAttention", models.Attention)
CORE = models.RadixAttention(1)


def _with_two_rotations() -> nn.Module:
    layer = _layer(models.RotaryEmbedding())
    layer.add_module("rotary_emb_2", models.RotaryEmbedding())
    return layer


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (_layer(_rotary("DualChunkRotaryEmbedding")), "DualChunkRotaryEmbedding: key positions wrap"),
        (_layer(_rotary("NovelRotaryEmbedding")), "NovelRotaryEmbedding: how it rotates keys is not known"),
        (_layer(models.RotaryEmbedding(), is_cross_attention=True), "which attends to other text"),
        (_with_two_rotations(), r"several rotary embeddings \(RotaryEmbedding, RotaryEmbedding\)"),
        (_layer(models.RotaryEmbedding(), 0), "on the rows of layer 'layers.0'"),
        (HUNYUAN(models.RotaryEmbedding(), CORE, use_qk_norm=True), "which normalises keys after their rotation"),
        (_layer(models.LinearScalingRotaryEmbedding(scaling_factors=[1.0, 2.0])), r"scaling_factors=\[1.0, 2.0\]"),
    ],
)
def test_refuses_layers_by_name(layer: nn.Module, match: str) -> None:
    """Next to a plain layer: one layer that cannot be shifted is enough."""
    with pytest.raises(UnsupportedError, match=match) as caught:
        _read(models.make_model(_layer(models.RotaryEmbedding(), 0), layer))
    assert models.LINE.fullmatch(str(caught.value))


@pytest.mark.parametrize(
    "layer",
    [
        _layer(None),
        _layer(nn.ModuleList([models.RotaryEmbedding()] * 2)),
        models.Attention(models.RotaryEmbedding(base=1e6), models.RadixAttention(1), use_rope=False),
    ],
)
def test_keys_of_layers_that_say_they_have_no_positions_do_not_turn(layer: nn.Module) -> None:
    geometry = _read(models.make_model(_layer(models.RotaryEmbedding(), 0), layer, _layer(None, 2)))
    (turning, first), (still, others) = geometry.groups()
    assert (first, others) == ([0], [1, 2])
    assert turning.inv_freq.all()
    assert not still.inv_freq.any()


@pytest.mark.parametrize("model", [nn.Linear(2, 2), models.make_model(_layer(None))])
def test_refuses_a_model_without_rope(model: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match="which has no rotary embedding: as no layer of its model has one"):
        _read(model)


@pytest.mark.parametrize("max_shift", [0, -1, 1 << 25])
def test_max_shift_is_checked(max_shift: int) -> None:
    with pytest.raises(ValueError, match=f"max_shift={max_shift}"):
        read_geometry(models.make_llama(), max_shift=max_shift)


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", ["base", "scaling", "one pair", "dtype"])
def test_a_module_whose_table_is_another_is_refused(fault: str, table_dtype: torch.dtype) -> None:
    """The frequencies that are read must be those that the module rotates by; `test_moved_rows` has the layout."""
    rotary = models.RotaryEmbedding(table_dtype=table_dtype, magnitude=1.37)
    model = models.make_llama(rotary=rotary)
    _read(model)
    if fault == "base":
        rotary.base *= 1.1
    elif fault == "scaling":
        rotary.cos_sin_cache = models.LinearScalingRotaryEmbedding(scaling_factors=[1.1]).cos_sin_cache.to(table_dtype)
    elif fault == "one pair":
        rotary.cos_sin_cache[:, 3::8] = models.RotaryEmbedding(base=1_000.0).cos_sin_cache[:, 3::8].to(table_dtype)
    else:
        rotary.cos_sin_cache = rotary.cos_sin_cache.to(torch.float64)
    with pytest.raises(ContractError, match=r"RotaryEmbedding: the table of angles differs .* at position 1000"):
        _read(model)
