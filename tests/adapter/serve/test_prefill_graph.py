"""Captured prefill graphs compute gap batches where they can: SGLang's own runner of breakable graphs, no device.

A replay computes again what was captured, with the batch of the capture, and only what a breakable graph leaves out of
its segments (attention) sees the batch at hand, as on a device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_pic.adapter.sglang.contract import BUILT_FOR, installed_version
from sglang_pic.adapter.startup.self_test import run_self_test
from sglang_pic.config import PicConfig
from tests.helpers.processes import on_live_model, spliced_path

BUCKETS = [32, 64, 128, 256, 512]


def capturing_runner(runner: Any) -> Any:
    """SGLang's `PrefillCudaGraphRunner` for `runner`, with a backend that replays without CUDA."""
    from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as module
    from sglang.srt.runtime_context import get_exec

    class Replays(module.BreakableCudaGraphBackend):  # type: ignore[misc, name-defined]
        """Keeps the captured batches; `served` are the tokens of each replay."""

        def __init__(self, graphs: Any) -> None:
            self._graphs_of, self.batches, self.served = graphs, {}, []

        @contextmanager
        def capture_session(self, stream: object) -> Iterator[None]:
            with self.replay_session():
                yield

        def capture_one(self, shape_key: Any, forward_fn: Callable[[], object], **_: object) -> None:
            self.batches[shape_key] = inspect.getclosurevars(forward_fn).nonlocals["forward_batch"]
            forward_fn()

        def can_run(self, _: object, shape_key: Any) -> bool:
            return shape_key in self.batches

        def replay(self, shape_key: Any, static_forward_batch: Any, **_: object) -> Any:
            captured = self.batches[shape_key]
            self.served.append((static_forward_batch.extend_num_tokens, static_forward_batch.batch_size))
            body = self._graphs_of.layer_model
            return type(body).forward(body, captured.input_ids, captured.positions, captured)

    module.resolve_prefill_backend = Replays
    module.graph_capture = lambda **_: nullcontext(SimpleNamespace(stream=None))
    module.get_or_create_global_graph_capture_stream = lambda: None
    module.PrefillCudaGraphRunner.warmup = lambda _: None
    # What only the compiled backend looks at.
    for layers in ("attention_layers", "mha_companion_layers", "moe_layers", "moe_fusions"):
        setattr(runner, layers, [])
    # On a device the logits have a place of their own.
    runner.graph_shared_output = SimpleNamespace(
        max_rows=512, get_logits_buffer=lambda vocabulary, rows: torch.full((rows, vocabulary), torch.nan)
    )
    prefill = get_exec().graph.cuda_graph_config.prefill
    prefill.backend, prefill.bs = "breakable", BUCKETS
    return module.PrefillCudaGraphRunner(runner)


def run_cases(runner: Any, _: object) -> dict[str, object]:
    """The self-test, with graphs that take its gap batches and with graphs that do not, and what was replayed."""
    path = spliced_path(runner)
    compute, said = path._compute_gaps, list[bool]()

    def compute_gaps(*args: Any) -> Any:
        output = compute(*args)
        said.append(output.can_run_graph)
        return output

    path._compute_gaps = compute_gaps  # type: ignore[method-assign]

    def test() -> object:
        with torch.no_grad():
            return run_self_test(runner, path.splicer, PicConfig(), tokenizer=None, max_gaps=32, tp_group=None)

    runner.prefill_cuda_graph_runner = graphs = capturing_runner(runner)
    results: dict[str, object] = {}
    for name, most in (("replayed", graphs.max_bs), ("too many sequences", 1)):
        graphs.max_bs = most
        graphs.backend.served.clear()
        said.clear()
        results[name] = {"test": test(), "replays": list(graphs.backend.served), "said": list(said)}
    return results


@pytest.mark.feature("prefill CUDA graphs")
@pytest.mark.skipif(installed_version() != BUILT_FOR, reason="graphs of other versions are not replayed")
def test_a_breakable_graph_replays_gap_batches_as_exactly_as_they_run_eagerly(model_dir: Callable[[str], Path]) -> None:
    """Its segments know of neither sequences nor gaps; attention and logits see the batch at hand."""
    server = {"dtype": "float32", "page_size": 1, "max_running_requests": 8}
    replayed, bounded = on_live_model(run_cases, model_dir("tiny-gqa"), **server).values()
    for case in (replayed, bounded):
        assert case["test"]["verdict"] == "passed"
        assert case["test"]["measured"]["moved"]["kl_nats"] < 1e-6
        assert case["test"]["measured"]["moved"]["key_error"] < 1e-3
    gaps = [[num_tokens, sequences] for num_tokens, sequences in replayed["replays"] if sequences > 1]
    assert len(gaps) == 9, "three spliced passes of each of three prompts"
    assert {sequences for _, sequences in gaps} == {2, 3}
    assert {sequences for _, sequences in bounded["replays"]} == {1}
    assert all(replayed["said"]), "what the experiments' plugin counts"
    assert len(replayed["said"]) == len(bounded["said"]) >= 9
    assert not any(bounded["said"])
    assert replayed["test"]["measured"]["reordered"]["kl_nats"] == pytest.approx(
        bounded["test"]["measured"]["reordered"]["kl_nats"], rel=1e-3
    )
