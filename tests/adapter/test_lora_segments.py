"""SGLang's LoRA backends on a gap batch: each computed token gets the adapter of its own request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.lora.backend import lora_registry as backends
from sglang.srt.lora.lora_manager import LoRAManager

from sglang_pic.adapter.serve.gap_batch import build_gap_batch
from tests.adapter.builders import TRANSLATOR, extend_batch, splice
from tests.e2e import plugins

_SLOTS = {None: 0, "one": 1, "two": 2}


@pytest.fixture
def pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's tables lie in pinned memory, which only an accelerator's driver gives."""
    for owner, name in ((torch.Tensor, "pin_memory"), (torch, "tensor"), (torch, "empty"), (torch, "zeros")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    plugins.without_pinned_memory()


def make_manager(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's manager of adapters, as far as it prepares a batch."""
    kind = backends.get_backend_from_name(name)
    chunked = SimpleNamespace(max_lora_chunk_size=16)
    monkeypatch.setattr("sglang.srt.lora.backend.chunked_backend.get_lora", lambda: chunked)
    manager = LoRAManager.__new__(LoRAManager)
    manager.lora_backend = kind(max_loras_per_batch=3, device=torch.device("cpu"), server_args=None)
    manager.attn_dp_enabled, manager.max_loras_per_batch = False, 3
    manager.memory_pool = SimpleNamespace(uid_to_buffer_id=_SLOTS, get_buffer_id=_SLOTS.__getitem__)
    manager.loras = {name: SimpleNamespace(config=SimpleNamespace(r=8), scaling=1.0) for name in ("one", "two")}
    return manager


def slots_of_tokens(info: Any, num_tokens: int) -> list[int]:
    """For each token of the batch, the place of its adapter's weights."""
    bounds, slots = info.seg_indptr.tolist(), info.weight_indices.tolist()
    found = [-1] * num_tokens
    order = range(num_tokens) if info.permutation is None else info.permutation.tolist()
    for i in range(info.num_segments):
        for place in range(bounds[i], bounds[i + 1]):
            found[order[place]] = slots[i]
    return found


@pytest.mark.usefixtures("pageable")
@pytest.mark.parametrize("name", ["torch_native", "csgmv", "triton"])
def test_each_computed_token_has_its_requests_adapter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens, adapters = [60, 20, 40, 9], ["one", None, "two", "one"]
    pending = [splice(0, 60, (5, 20, 0), (30, 41, 0)), None, splice(0, 40, (0, 33, 0)), None]
    rows = [torch.arange(64 * i, 64 * i + 64) for i in range(4)]
    gap = build_gap_batch(pending, [0] * 4, lens, lens, rows, torch.device("cpu"))
    batch = extend_batch(lens, lora_ids=[*adapters])
    manager = make_manager(name, monkeypatch)
    runner: Any = SimpleNamespace(lora_manager=manager, kv_index_translator=TRANSLATOR, prefill_aware_swa=False)
    manager.prepare_lora_batch(batch)
    owners = [adapter for adapter, n in zip(adapters, lens, strict=True) for _ in range(n)]
    assert slots_of_tokens(manager.lora_backend.batch_info, sum(lens)) == [_SLOTS[owner] for owner in owners]
    with gap.narrowed(batch, runner):
        kept = gap.kept.tolist()
        assert len(batch.input_ids) == len(kept) == 34 + 20 + 7 + 9
        assert slots_of_tokens(manager.lora_backend.batch_info, len(kept)) == [_SLOTS[owners[i]] for i in kept]
