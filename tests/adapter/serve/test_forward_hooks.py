"""The forward hooks: which backend is switched, and which batches are left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models import deepseek_v2
from sglang.srt.runtime_context import get_context

from sglang_pic.adapter.serve import prefill_path as paths
from sglang_pic.adapter.serve.forward import ForwardPath
from sglang_pic.adapter.serve.prefill_path import prefill_path, replays_gaps
from sglang_pic.adapter.sglang.contract import BUILT_FOR
from tests.helpers.builders import make_path, request, scheduled


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
def test_flashinfer_reads_pages_while_a_gap_batch_runs_and_graphs_stay_that_replay_it(
    hybrid: bool, replays: bool
) -> None:
    """Its ragged path reads the prefix before the layer's own keys are written: a gap would see rows of before."""
    # SGLang's class keeps the name of a kernel where a hybrid backend has its backend for prefill.
    flashinfer = SimpleNamespace(use_paged=False, prefill_backend="fa2", decode_backend="fa2")
    backend = SimpleNamespace(prefill_backend=flashinfer, decode_backend=object()) if hybrid else flashinfer
    runner = SimpleNamespace(attn_backend=backend, prefill_cuda_graph_runner="captured")
    with prefill_path(runner, replays=replays):
        assert flashinfer.use_paged
        assert runner.prefill_cuda_graph_runner == ("captured" if replays else None)
    assert not flashinfer.use_paged
    assert runner.prefill_cuda_graph_runner == "captured"


def test_the_dense_path_of_dsa_is_off_while_a_gap_batch_runs() -> None:
    """It would project every sequence's whole prefix anew, and its tables are not those of the absorbed query."""
    backend = SimpleNamespace(supports_mha_one_shot=True)
    with prefill_path(SimpleNamespace(attn_backend=backend, prefill_cuda_graph_runner=None), replays=False):
        assert not backend.supports_mha_one_shot
    assert backend.supports_mha_one_shot


class Watcher:
    """An observer that wants to be told of every batch with request `rid`."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.told: list[object] = []

    def watch(self, batch: Any) -> Any:
        return self.told.append if any(req.rid == self.rid for req in batch.reqs) else None


def test_observers_are_told_of_the_passes_they_watch() -> None:
    """Once, with what the runner returned; a pass that nobody watches carries nothing."""
    first, second = Watcher("a"), Watcher("b")
    path = ForwardPath(None, [first, second], None)  # type: ignore[arg-type]

    def run(rid: str, *, prefills: bool = True) -> str:
        batch, computed = SimpleNamespace(), scheduled([request(rid=rid)], [300])
        computed.forward_mode.is_extend_without_speculative = lambda: prefills
        assert path._prepare(batch, object, computed, None) is None  # type: ignore[arg-type, func-returns-value]
        output = path._forward(lambda *_: f"output of {rid}", None, batch)  # type: ignore[arg-type]
        assert vars(batch) == {}
        return str(output)

    assert [run("a"), run("b"), run("c"), run("a", prefills=False)] == [f"output of {rid}" for rid in "abca"]
    assert (first.told, second.told) == (["output of a"], ["output of b"])


def test_the_layer_of_a_gap_batch_knows_the_backend_that_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It prepares queries and keys as that backend takes them, and the pass before may have been of another."""
    backend = SimpleNamespace(prefill_attention_backend_str="fa3", decode_attention_backend_str="flashmla")
    monkeypatch.setattr(deepseek_v2, "get_attn_backend", lambda: backend)
    plain = {"chunked_prefix_cache_threshold": 0, "disable_chunked_prefix_cache": True, "qk_rope_head_dim": 64}
    layer = SimpleNamespace(current_attention_backend=None, flashinfer_mla_disable_ragged=False, **plain)
    dispatch = deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method
    path = make_path(None)  # type: ignore[arg-type]

    def choose(mode: Any, prefix_lens: list[int]) -> str:
        fields = {"forward_mode": mode, "extend_prefix_lens_cpu": prefix_lens, "seq_lens_cpu": [100]}
        batch = SimpleNamespace(**fields, attn_cp_metadata=None, get_max_chunk_capacity=lambda: 1000)
        return str(path._mla_method(dispatch, layer, batch).name)  # type: ignore[arg-type]

    with get_context().override_server_args(device="cpu"):
        assert (choose(ForwardMode.EXTEND, [0]), layer.current_attention_backend) == ("MHA_ONE_SHOT", "fa3")
        assert (choose(ForwardMode.DECODE, []), layer.current_attention_backend) == ("MLA", "flashmla")
        path._running = SimpleNamespace()  # type: ignore[assignment]
        assert (choose(ForwardMode.EXTEND, [0]), layer.current_attention_backend) == ("MLA", "fa3")


def test_graphs_that_cannot_replay_gaps_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "installed_version", lambda: BUILT_FOR)

    def replays(num_sequences: int = 8, *, is_latent: bool = False, **changed: Any) -> bool:
        graphs = SimpleNamespace(
            prefill_backend_name=changed.pop("graph", "breakable"), max_bs=changed.pop("max_bs", 8)
        )
        fields = {"lora_manager": None, "prefill_attention_backend_str": "fa3", "prefill_cuda_graph_runner": graphs}
        runner = SimpleNamespace(**{**fields, **changed})
        return replays_gaps(runner, num_sequences, is_latent=is_latent)

    assert replays()
    assert replays(is_latent=True)
    assert not replays(9), "one sequence more than the runner's buffers have places"
    assert not replays(graph="full"), "the number of sequences is captured"
    assert not replays(lora_manager=object())
    monkeypatch.setattr(paths, "REPLAYS_LORA", True)
    assert replays(lora_manager=object())
    assert not replays(is_latent=True, prefill_attention_backend_str="fa4"), "captured with expanded keys"
    assert not replays(prefill_cuda_graph_runner=None)
    assert not replays(prefill_cuda_graph_runner=object()), "SGLang's eager runner stands there without graphs"
    monkeypatch.setattr(paths, "installed_version", lambda: "0.5.22")
    assert not replays(), "tested with another version"
