"""Captured prefill graphs compute gap batches where they can: SGLang's own runner of breakable graphs, no device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_pic.adapter.contract import BUILT_FOR, installed_version
from tests.adapter.prefill_graph_driver import run_cases
from tests.adapter.processes import on_live_model


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
    assert replayed["test"]["measured"]["reordered"]["kl_nats"] == pytest.approx(
        bounded["test"]["measured"]["reordered"]["kl_nats"], rel=1e-3
    )
