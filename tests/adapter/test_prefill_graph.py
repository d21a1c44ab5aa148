"""Captured prefill graphs compute gap batches where they can: SGLang's own runner of breakable graphs, no device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sglang_pic.adapter.contract import BUILT_FOR, installed_version

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.feature("prefill CUDA graphs")
@pytest.mark.skipif(installed_version() != BUILT_FOR, reason="graphs of other versions are not replayed")
def test_a_breakable_graph_replays_gap_batches_as_exactly_as_they_run_eagerly(
    model_dir: Callable[[str], Path],
) -> None:
    """Its segments know of neither sequences nor gaps; attention and logits see the batch at hand."""
    command = [sys.executable, "-m", "tests.adapter.prefill_graph_driver", str(model_dir("tiny-gqa"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280, env=os.environ)
    assert done.returncode == 0, done.stderr[-4_000:]
    replayed, bounded = json.loads(done.stdout.splitlines()[-1]).values()
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
