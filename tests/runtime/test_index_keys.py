"""Index keys of a sparse-attention indexer: seen beside the latent rows, moved with them, checked at start-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from pic_kernels import RopeParams
from pic_kernels.index_pages import PAGE_BYTES, read_keys
from pic_kernels.numerics import INDEX_REL_L2, relative_l2
from torch import Tensor

from sglang_pic.errors import ContractError, UnsupportedError
from sglang_pic.runtime import RopeGeometry, Splicer, read_geometry, view_pool
from sglang_pic.runtime.checks.moved_rows import RowErrors, RowSlots, checked_shifts, judge_rows, measure_rows
from sglang_pic.runtime.index_keys import IndexRope
from tests.helpers import rope_models as models

SHARED = (1,)
"""The layer that uses another one's index."""
NUM_TOKENS = 20


class Model:
    """Two layers with an indexer and one without; rows and index keys are those of a text at a position."""

    def __init__(self) -> None:
        self.pool = models.DSATokenToKVPool(shared=SHARED)
        self.model = models.make_dsa(shared=SHARED, rotary=models.RotaryEmbedding(num_positions=4_096))
        self.geometry = read_geometry(self.model, max_shift=2_048)
        self.raw = torch.randn(3, NUM_TOKENS, 128, generator=torch.Generator().manual_seed(1))

    def compute(self, slots: Tensor, position: int) -> None:
        for layer, raw, buffer in zip(self.model.layers, self.raw, self.pool.kv_buffer, strict=True):
            keys = raw[:, None, 24:40]
            positions = position + torch.arange(NUM_TOKENS)
            turned = layer.rotary_emb.forward_native(positions, keys, keys)[1]
            buffer[slots] = torch.cat((raw[:, None, :24], turned), dim=-1)
            if layer.indexer is not None:
                layer.indexer.write(self.pool.index_key_cache.buffer[layer.attn_0.layer_id], slots, raw, position)

    def check(self, geometry: RopeGeometry) -> RowErrors:
        shifts, view = checked_shifts(2_048, NUM_TOKENS), view_pool(self.pool)
        slots = RowSlots(*(64 + number * NUM_TOKENS + torch.arange(NUM_TOKENS) for number in range(3)))
        return judge_rows(measure_rows(Splicer(view, geometry), self.compute, slots, shifts), view, shifts)


def test_index_keys_are_moved_with_their_rows() -> None:
    """From one page to another; layers without an index are left out, and layers alike are one group."""
    model, src, dst = Model(), 50 + torch.arange(NUM_TOKENS), 110 + torch.arange(NUM_TOKENS)
    view = view_pool(model.pool)
    assert [pages.shape for pages in view.index] == [(3, 1, PAGE_BYTES), (0, 1, PAGE_BYTES), (3, 1, PAGE_BYTES)]
    first, none, last = model.geometry.index
    assert (first is last, none) == (True, None)
    model.compute(src, 100)
    Splicer(view, model.geometry).splice(src, dst, torch.full((NUM_TOKENS,), 345))
    moved = [read_keys(pages, dst) for pages in view.index if len(pages)]
    model.compute(dst, 445)
    for got, pages in zip(moved, (view.index[0], view.index[2]), strict=True):
        assert relative_l2(got, read_keys(pages, dst)) <= INDEX_REL_L2


def test_index_keys_in_rows_turn_as_the_keys_of_their_layer() -> None:
    """In a dtype of their own; what is behind the rotary part is copied, and a layer without an indexer has none."""
    pool = models.MiniMaxSparseKVPool()
    view, model = view_pool(pool), models.make_llama(3)
    assert ([rows is None for rows in view.index_rows], view.index_dtype) == ([True, False, False], torch.bfloat16)
    splicer = Splicer(view, read_geometry(model, max_shift=1_024))
    src, dst = torch.arange(5, 15), torch.arange(40, 50)
    before = [rows[src].clone() for rows in pool.index_k_pool.k_buffer]
    splicer.splice(src, dst, torch.full((10,), 345))
    for rows, raw in zip(pool.index_k_pool.k_buffer, before, strict=True):
        assert torch.equal(rows[dst][..., 16:], raw[..., 16:])
        positions, turns = torch.full((10,), 345), raw[..., :16].float()
        turned = model.layers[0].rotary_emb.forward_native(positions, turns, turns)[1]
        assert relative_l2(rows[dst][..., :16], turned) < 1e-2
    splicer.splice(dst, src, torch.full((10,), -345))
    for rows, raw in zip(pool.index_k_pool.k_buffer, before, strict=True):
        assert relative_l2(rows[src], raw) < 1e-2
    view.fill(dst, 0)
    assert not any(rows[dst].any() for rows in pool.index_k_pool.k_buffer)
    wide = models.make_llama(3, models.RotaryEmbedding(head_size=32, rotary_dim=32))
    narrow = view_pool(models.MiniMaxSparseKVPool(main_pool=models.MHATokenToKVPool(head_dim=32)))
    with pytest.raises(UnsupportedError, match=r"^--radix.* rotary_dim=32 in index keys: they have 24 dimensions"):
        Splicer(narrow, read_geometry(wide, max_shift=1_024))


def test_scaled_rows_turn_in_their_rotary_part_alone() -> None:
    """256 FP8 values, two scales and 16 rotary values in bfloat16 a row, as SGLang stores GLM-5's with --kv-cache-dtype
    fp8_e4m3; values and scales keep their bytes, whatever these are."""
    model, src, dst = Model(), 50 + torch.arange(NUM_TOKENS), 110 + torch.arange(NUM_TOKENS)
    pool, width = model.pool, 256 + 2 * 4
    pool.kv_lora_rank, pool.dtype, pool.dsa_kv_cache_store_fp8 = 256, torch.float8_e4m3fn, True
    random = torch.Generator().manual_seed(2)
    pool.kv_buffer = [torch.randint(256, (192, 1, width + 2 * 16), dtype=torch.uint8, generator=random) for _ in "123"]
    keys = torch.randn(NUM_TOKENS, 1, 16, generator=random).to(torch.bfloat16)
    for buffer in pool.kv_buffer:
        buffer[src, :, width:] = keys.view(torch.uint8)
    before = [buffer[src, :, :width].clone() for buffer in pool.kv_buffer]
    splicer = Splicer(view_pool(pool), model.geometry)
    splicer.splice(src, dst, torch.full((NUM_TOKENS,), 345))
    positions = torch.full((NUM_TOKENS,), 345)
    for layer, buffer, raw in zip(model.model.layers, pool.kv_buffer, before, strict=True):
        assert torch.equal(buffer[dst, :, :width], raw)
        turned = layer.rotary_emb.forward_native(positions, keys.float(), keys.float())[1]
        assert relative_l2(buffer[dst, :, width:].view(torch.bfloat16), turned) < 1e-2
    latent = torch.linspace(-3, 3, 256).expand(NUM_TOKENS, 256)
    for buffer in pool.kv_buffer:
        scales = latent.unflatten(1, (2, 128)).abs().amax(2) / 448
        values = (latent / scales.repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
        buffer[dst, 0, :256], buffer[dst, 0, 256:width] = values.view(torch.uint8), scales.view(torch.uint8)
    (read,) = splicer.view.read(0, dst)
    assert relative_l2(read[:, 0, :256], latent) < 0.05
    assert torch.equal(
        read[..., splicer.rotary_part(0)].float(), pool.kv_buffer[0][dst, :, width:].view(torch.bfloat16).float()
    )


def _turned(change: Callable[[RopeParams], RopeParams]) -> Callable[[IndexRope], IndexRope]:
    return lambda form: dataclasses.replace(form, rope=change(form.rope))


@pytest.mark.parametrize(
    "change",
    [
        _turned(lambda rope: dataclasses.replace(rope, is_neox_style=False)),
        _turned(lambda rope: dataclasses.replace(rope, inv_freq=-rope.inv_freq)),
        _turned(lambda rope: dataclasses.replace(rope, inv_freq=0 * rope.inv_freq)),
        lambda form: dataclasses.replace(form, is_mixed=False),
    ],
    ids=["layout", "sign", "unmoved", "not mixed"],
)
@pytest.mark.parametrize("layer", [0, 2])
def test_index_keys_moved_otherwise_stop(change: Callable[[IndexRope], IndexRope], layer: int) -> None:
    """In the first layer, and in another, whose latent rows are right."""
    model = Model()
    index = tuple(change(form) if form and at == layer else form for at, form in enumerate(model.geometry.index))
    with pytest.raises(ContractError, match=rf"^layer {layer}: index keys moved by -?\d+ positions differ"):
        model.check(dataclasses.replace(model.geometry, index=index))


def _pool(**attributes: object) -> models.DSATokenToKVPool:
    pool = models.DSATokenToKVPool()
    for name, value in attributes.items():
        setattr(pool, name, value)
    return pool


@pytest.mark.parametrize(
    ("pool", "match"),
    [
        (_pool(index_kpool=4), "index_kpool=4: a pooled index key belongs to several tokens"),
        (_pool(index_page_size=1), "index_page_size=1: index keys must lie in pages of 64"),
        (
            _pool(dsa_kv_cache_store_fp8=True),
            "scaled FP8 rows of shape .*: rows must have .* --kv-cache-dtype bfloat16",
        ),
        (models.DSATokenToKVPool(shared=(0, 1)), "1 layers of index keys in the KV pool and 2 with an indexer"),
        (models.MLATokenToKVPool(), "0 layers of index keys in the KV pool and 2 with an indexer"),
    ],
)
def test_what_cannot_be_moved_is_refused(pool: object, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match) as caught:
        Splicer(view_pool(pool), Model().geometry)
    assert models.LINE.fullmatch(str(caught.value))
