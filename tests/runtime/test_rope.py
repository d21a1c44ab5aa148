"""Which layers turn by what, which KV pools are moved, what is refused, and the splice executor, on stand-ins."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from sglang_pic.errors import ContractError, UnsupportedError
from sglang_pic.runtime import RopeGeometry, Splicer, read_geometry, view_pool
from tests.helpers import rope_models as models


def _read(model: nn.Module) -> RopeGeometry:
    return read_geometry(model, max_shift=8_192)


def _rotary(name: str) -> nn.Module:
    return models.named(name, models.RotaryEmbedding)()


def _layer(rotary: nn.Module | None, layer_id: int = 1, **core: int) -> nn.Module:
    return models.Attention(rotary, models.RadixAttention(layer_id, **core))


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


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", ["base", "scaling", "one pair", "dtype"])
def test_a_module_whose_table_is_another_is_refused(fault: str, table_dtype: torch.dtype) -> None:
    """The frequencies that are read must be those that the module rotates by; `test_moved_rows` has the layout."""
    rotary = models.RotaryEmbedding(dtype=table_dtype)
    rotary.cos_sin_cache *= 1.37
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


def _splicer(pool: object, model: torch.nn.Module | None = None) -> Splicer:
    return Splicer(view_pool(pool), read_geometry(model or models.make_llama(), max_shift=1_000))


def _ids(*slots: int) -> Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def _set(attribute: str, value: object) -> models.MHATokenToKVPool:
    pool = models.MHATokenToKVPool()
    setattr(pool, attribute, value)
    return pool


INTERLEAVED = models.named("PageInterleaveMHATokenToKVPool", models.MHATokenToKVPool)


@pytest.mark.parametrize(
    ("pool", "match"),
    [
        (models.MiniMaxSparseKVPool(index_kv_pool=object()), "MiniMaxSparseKVPool of index_kv_pool: its indexer has"),
        (models.named("Other", models.MiniMaxSparseKVPool)(), "the KV pool Other: how it stores rows is not known"),
        (INTERLEAVED(), "PageInterleaveMHATokenToKVPool, a MHATokenToKVPool with a layout"),
        (models.named("BaseSWAKVPool")(), "BaseSWAKVPool: rows outside .*; start with"),
        (models.SWAKVPool(swa_req_ring_size=64), "SWAKVPool of swa_req_ring_size: windows are a ring"),
        (
            models.SWAKVPool(models.MHATokenToKVPool(dtype=torch.bfloat16)),
            "beside windows of mha rows of torch.bfloat16",
        ),
        (object(), "object: how it stores rows is not known"),
        (models.MHATokenToKVPool(dtype=torch.float8_e5m2), "rows of float8_e5m2: .*--kv-cache-dtype"),
        (models.MHATokenToKVPool(layer_num=0), "no layer"),
        (_set("kv_cache_layout", "vectorized_5d"), "kv_cache_layout='vectorized_5d'"),
        (_set("use_hnd", True), "use_hnd=True"),
        (_set("is_quantized_kv_cache", True), "is_quantized_kv_cache=True"),
        (_set("post_capture_active", True), "post_capture_active=True"),
        (_set("layer_shard_enabled", True), "layer_shard_enabled=True"),
    ],
)
def test_refuses_pools_by_name_and_layouts_by_attribute(pool: object, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match) as caught:
        view_pool(pool)
    assert models.LINE.fullmatch(str(caught.value))


def test_a_pool_of_another_shape_is_refused_and_one_that_lost_an_attribute_breaks_the_contract() -> None:
    pool = models.MHATokenToKVPool()
    pool.k_buffer[1] = pool.k_buffer[1].transpose(0, 1).contiguous()
    with pytest.raises(UnsupportedError, match="layer 1 of shape"):
        view_pool(pool)
    pool = models.MLATokenToKVPool()
    del pool.kv_lora_rank
    with pytest.raises(ContractError, match="kv_lora_rank"):
        view_pool(pool)


def test_windows_move_in_slots_of_their_own() -> None:
    """Their keys and values may have other widths, and other slots, than those of other layers; K and V differ too."""
    pool = models.SWAKVPool()
    splicer = _splicer(pool)
    assert [tuple(buffer.shape[1:]) for buffer in splicer.view.keys] == [(2, 24), (2, 16), (2, 24)]
    assert [tuple(buffer.shape[1:]) for buffer in splicer.view.values] == [(2, 12), (2, 16), (2, 12)]
    src, dst, shifts = _ids(40, 41), _ids(50, 51), _ids(0, 7)
    pool.full_to_swa_index_mapping[torch.cat((src, dst))] = _ids(3, 9, 5, 4)
    whole, window = pool.full_kv_pool, pool.swa_kv_pool
    before = [buffer.clone() for buffer in (*window.k_buffer, *window.v_buffer)]
    splicer.splice(src, dst, shifts)
    assert torch.equal(whole.v_buffer[0][dst], whole.v_buffer[0][src])
    for old, new in zip(before, (*window.k_buffer, *window.v_buffer), strict=True):
        assert torch.equal(new[5], old[3])
        assert torch.equal(new[[*range(4), *range(6, len(new))]], old[[*range(4), *range(6, len(old))]])
    # What the donors' slots were when they were locked counts, whatever has become of them.
    pool.full_to_swa_index_mapping[src] = 0
    splicer.splice(src, dst, shifts, _ids(8, 7))
    assert torch.equal(window.v_buffer[1][_ids(5, 4)], before[3][_ids(8, 7)])
    splicer.view.fill(dst, 0)
    assert not any(rows.any() for layer in range(3) for rows in splicer.view.read(layer, dst))
    assert window.k_buffer[0][3].any()


@pytest.mark.parametrize(
    ("src", "dst", "shifts", "error", "match"),
    [
        (_ids(1, 2), _ids(2, 3), _ids(1, 1), ValueError, "share"),
        (_ids(1, 2), _ids(3, 65), _ids(1, 1), ValueError, "dst holds slots"),
        (_ids(1, 2), _ids(3), _ids(1, 1), ValueError, "with one n"),
        (_ids(1), _ids(3), _ids(-1_001), ValueError, "max_shift=1000"),
        (_ids(1), _ids(3).int(), _ids(1), TypeError, "dst.dtype"),
        (_ids(), _ids(), _ids(), None, None),
    ],
)
def test_broken_operands_and_none_write_nothing(
    src: Tensor, dst: Tensor, shifts: Tensor, error: type[Exception] | None, match: str | None
) -> None:
    pool = models.MHATokenToKVPool()
    before = [buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    with nullcontext() if error is None else pytest.raises(error, match=match):
        _splicer(pool).splice(src, dst, shifts)
    assert all(map(torch.equal, before, (*pool.k_buffer, *pool.v_buffer)))


@pytest.mark.parametrize(
    ("pool", "match"),
    [
        (models.MHATokenToKVPool(layer_num=2), r"layers \[0, 2\) in the KV pool and \[0, 3\) with"),
        (_set("start_layer", 1), r"layers \[1, 4\)"),
        (models.MHATokenToKVPool(head_dim=8), "rotary_dim=16 in mha rows"),
        (models.MLATokenToKVPool(qk_rope_head_dim=32), "rotary_dim=16 in mla rows"),
    ],
)
def test_a_pool_that_is_not_the_models_is_refused(pool: object, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        _splicer(pool)
