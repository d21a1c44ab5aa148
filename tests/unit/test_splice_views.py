"""Which KV pools are moved, and which are refused with what reason."""

from __future__ import annotations

import pytest
import rope_models as models
import torch

from sglang_pic.errors import ContractError, UnsupportedError
from sglang_pic.runtime import PoolKind, view_pool


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


def test_fp8_pools_store_bytes() -> None:
    view = view_pool(models.MHATokenToKVPool(dtype=torch.float8_e4m3fn))
    assert {buffer.dtype for buffer in (*view.keys, *view.values)} == {torch.float8_e4m3fn}


@pytest.mark.parametrize(
    ("pool", "match"),
    [
        (models.DSATokenToKVPool(), "DSATokenToKVPool: its sparse-attention indexer"),
        (models.PageInterleaveMHATokenToKVPool(), "PageInterleaveMHATokenToKVPool, a MHATokenToKVPool with a layout"),
        (models.SWAKVPool(), "SWAKVPool: .*; start with --disable-hybrid-swa-memory"),
        (object(), "object: how it stores rows is not known"),
        (models.MHATokenToKVPool(dtype=torch.float8_e5m2), "rows of float8_e5m2: .*--kv-cache-dtype"),
        (models.MHATokenToKVPool(layer_num=0), "no layer"),
    ],
)
def test_refuses_pools_by_name(pool: object, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match) as caught:
        view_pool(pool)
    assert models.LINE.fullmatch(str(caught.value))


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("kv_cache_layout", "vectorized_5d"),
        ("use_hnd", True),
        ("is_quantized_kv_cache", True),
        ("post_capture_active", True),
        ("layer_shard_enabled", True),
    ],
)
def test_refuses_layouts_by_attribute(attribute: str, value: object) -> None:
    pool = models.MHATokenToKVPool()
    setattr(pool, attribute, value)
    with pytest.raises(UnsupportedError, match=f"{attribute}={value!r}") as caught:
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
