"""The start-up check of real rows through SGLang's own batch: what the runner is asked for, and what is left."""

from __future__ import annotations

import dataclasses
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    # SGLang and what it imports warn about this machine's missing accelerators.
    warnings.simplefilter("ignore")
    factory = pytest.importorskip("sglang.srt.layers.rotary_embedding.factory")
    memory_pool = pytest.importorskip("sglang.srt.mem_cache.memory_pool")

from sglang_pic.adapter.startup.row_check import check_rows
from sglang_pic.errors import ContractError, UnsupportedError
from sglang_pic.runtime import RopeGeometry, read_geometry, view_pool
from sglang_pic.runtime.splice import Splicer

pytestmark = pytest.mark.usefixtures("no_groups")


class RadixAttention(nn.Module):
    """SGLang's is recognised by this name; the real one needs a running server."""

    layer_id = 0


class Runner:
    """SGLang's model runner with one layer, whose rows depend on token and position."""

    device = "cpu"
    spec_algorithm = None
    lora_manager = None
    shared_read_done_event = None

    def __init__(self, page_size: int = 1, size: int = 256) -> None:
        self.token_to_kv_pool = memory_pool.MHATokenToKVPool(
            size=size,
            page_size=page_size,
            dtype=torch.bfloat16,
            head_num=2,
            head_dim=64,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros((3, 64), dtype=torch.int32))
        self.model_config = SimpleNamespace(vocab_size=1_000, model_is_mrope=False)
        self.kv_index_translator = SimpleNamespace(own_plan=lambda batch: SimpleNamespace(bind=lambda *_: None))
        self.rotary = factory.get_rope(64, 64, 9_000, 10_000, True, None, dtype=torch.float32)
        self.embedding = torch.randn((1_000, 2, 64), generator=torch.Generator().manual_seed(0))
        self.model = nn.Module()
        self.model.rotary_emb, self.model.attn = self.rotary, RadixAttention()
        self.positions: list[int] = []

    def forward(self, batch: Any) -> None:
        """Write the rows; the page table must name the slots that are written."""
        slots = batch.out_cache_loc
        (row,) = batch.req_pool_indices.tolist()
        assert self.req_to_token_pool.req_to_token[row, : len(slots)].tolist() == slots.tolist()
        assert batch.extend_prefix_lens.tolist() == [0]
        assert batch.seq_lens.tolist() == [len(slots)]
        self.positions.append(int(batch.positions[0]))
        raw = self.embedding[batch.input_ids]
        _, keys = self.rotary.forward_native(batch.positions, raw.clone(), raw.clone())
        self.token_to_kv_pool.k_buffer[0][slots] = keys.view_as(raw).bfloat16()
        self.token_to_kv_pool.v_buffer[0][slots] = raw.bfloat16()


def geometry_of(runner: Runner) -> RopeGeometry:
    return read_geometry(runner.model, max_shift=8_192)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_passes_and_leaves_nothing_behind(page_size: int) -> None:
    runner = Runner(page_size)
    pool, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    before = [buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer, table)]
    errors = check_rows(runner, Splicer(view_pool(pool), geometry_of(runner)), None)
    assert errors.keys < 5e-3
    assert errors.rest == 0
    assert errors.unmoved_keys > 0.5
    assert runner.positions == [0, 1, 17, 1_000, 8_000, 8_000]
    for buffer, old in zip((*pool.k_buffer, *pool.v_buffer, table), before, strict=True):
        assert torch.equal(buffer, old)


def test_a_wrong_rotation_stops_and_leaves_nothing_behind() -> None:
    runner = Runner()
    pool, geometry = runner.token_to_kv_pool, geometry_of(runner)
    before = pool.k_buffer[0].clone()
    (rope,) = geometry.params
    wrong = dataclasses.replace(geometry, params=(dataclasses.replace(rope, inv_freq=rope.inv_freq * 1.02),))
    with pytest.raises(ContractError, match=r"^layer 0: keys moved by"):
        check_rows(runner, Splicer(view_pool(pool), wrong), None)
    assert torch.equal(pool.k_buffer[0], before)
    assert not runner.req_to_token_pool.req_to_token.any()


def test_a_pool_too_small_says_how_large_it_must_be() -> None:
    runner = Runner(page_size=64, size=128)
    with pytest.raises(UnsupportedError, match=r"KV pool of 128 tokens .*--max-total-tokens 192 or more"):
        check_rows(runner, Splicer(view_pool(runner.token_to_kv_pool), geometry_of(runner)), None)
