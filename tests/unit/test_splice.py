"""Which KV pools are moved and which are refused, and the splice executor: moved keys are the model's at the target."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import rope_models as models
import torch
from pic_kernels.numerics import relative_l2
from torch import Tensor

from sglang_pic.errors import ContractError, UnsupportedError
from sglang_pic.runtime import PoolKind, Splicer, read_geometry, view_pool


def _splicer(pool: object, model: torch.nn.Module | None = None) -> Splicer:
    return Splicer(view_pool(pool), read_geometry(model or models.make_llama(), max_shift=1_000))


def _ids(*slots: int) -> Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def test_mha_pool_is_seen_as_it_is() -> None:
    pool = models.MHATokenToKVPool(page_size=16, v_head_dim=8, start_layer=4)
    view = view_pool(pool)
    assert view.kind is PoolKind.MHA
    assert [buffer.data_ptr() for buffer in view.keys] == [buffer.data_ptr() for buffer in pool.k_buffer]
    assert [buffer.data_ptr() for buffer in view.values] == [buffer.data_ptr() for buffer in pool.v_buffer]
    assert (view.num_slots, view.page_size, view.num_layers, view.start_layer) == (80, 16, 3, 4)
    assert (view.rope_offset, view.rope_dim) == (0, 16)


def test_mla_pool_is_seen_as_latent_rows() -> None:
    view = view_pool(models.MLATokenToKVPool(dtype=torch.bfloat16))
    assert view.kind is PoolKind.MLA
    assert view.values == ()
    assert (view.rope_offset, view.rope_dim) == (24, 16)


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


def test_refuses_buffers_of_another_shape() -> None:
    pool = models.MHATokenToKVPool()
    pool.k_buffer[1] = pool.k_buffer[1].transpose(0, 1).contiguous()
    with pytest.raises(UnsupportedError, match="layer 1 of shape"):
        view_pool(pool)


def test_a_pool_that_lost_an_attribute_breaks_the_contract() -> None:
    pool = models.MLATokenToKVPool()
    del pool.kv_lora_rank
    with pytest.raises(ContractError, match="kv_lora_rank"):
        view_pool(pool)


def test_moved_keys_are_the_models_own_at_the_target() -> None:
    """Keys written by the model's rotary embedding at one position, moved, against the same keys at the other."""
    ropes = [models.RotaryEmbedding(base=base) for base in (1e4, 1e6, 1e4)]
    layers = [models.Attention(rope, models.RadixAttention(i)) for i, rope in enumerate(ropes)]
    pool = models.MHATokenToKVPool(dtype=torch.float32)
    raw, start, shift = torch.randn(20, 2, 16), torch.arange(20) + 100, 345
    src, dst = torch.arange(20) + 1, torch.arange(20) + 40
    for rope, keys in zip(ropes, pool.k_buffer, strict=True):
        keys[src] = rope.forward_native(start, raw, raw)[1]
    _splicer(pool, models.make_model(*layers)).splice(src, dst, torch.full((20,), shift))
    for rope, keys, values in zip(ropes, pool.k_buffer, pool.v_buffer, strict=True):
        assert relative_l2(keys[dst], rope.forward_native(start + shift, raw, raw)[1]) < 1e-4
        assert torch.equal(values[dst], values[src])


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
        (models.MHATokenToKVPool(start_layer=1), r"layers \[1, 4\)"),
        (models.MHATokenToKVPool(head_dim=8), "rotary_dim=16 in mha rows"),
        (models.MLATokenToKVPool(qk_rope_head_dim=32), "rotary_dim=16 in mla rows"),
    ],
)
def test_a_pool_that_is_not_the_models_is_refused(pool: object, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        _splicer(pool)
