"""Layers with sliding windows: a splice is exact wherever the edge of a window lies.

Live models of six families: Gemma 3, whose layers with windows have a rotation of their own, gpt-oss, with sinks and a
pool for its windows, Command-R7B, whose other layers have no positions, MiMo-V2, whose keys are wider than its values,
Llama-4, whose attention is cut in chunks of 64, and MiniMax-M3, whose indexer chooses 4 blocks of 16. Runs are laid out
by hand, so that the edge of a window lies where a case wants it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from sglang_pic.adapter.probe.borrowed_slots import borrow_slots
from sglang_pic.adapter.probe.extend import PADDING_ROW
from sglang_pic.adapter.startup.row_check import check_rows
from sglang_pic.runtime.splice import Splicer
from tests.helpers.live_rows import NUM_TOKENS, SHIFT, Bench
from tests.helpers.processes import on_live_model, spliced_path

WINDOW: Final = 47
"""Tokens before its own that a query of a windowed layer sees."""

CASES: Final = {
    "a run longer than the window": ((40, 160),),
    "a run shorter than the window": ((180, 210),),
    "edge in a run": ((100, 150), (170, 180)),
    "edge in a gap": ((60, 80), (100, 140)),
    "edge in a seam": ((32, 90), (96, 130)),
    "edges everywhere": tuple((start, start + 19) for start in range(3, 220, 23)),
}
"""Runs `[start, end)` by case; what lies between is computed, a seam like any gap. Token 150 sees `[103, 150]`."""


def run_cases(runner: Any, _: object) -> dict[str, Any]:
    """What the model is, and what `measure` finds: every case at shift 0 and shifted, and two faults that must show."""
    path = spliced_path(runner)
    splicer, view, geometry = path.splicer, path.splicer.view, path.splicer.geometry
    layers = [module for module in runner.model.modules() if type(module).__name__ == "RadixAttention"]
    results: dict[str, Any] = {
        "windows": [layer.sliding_window_size for layer in layers],
        "rotations": [indices for _, indices in geometry.groups()],
        "rotary": sorted(
            {type(module).__name__ for module in runner.model.modules() if "Rotary" in type(module).__name__}
        ),
    }
    rows, _ = check_rows(runner, splicer, 64, None)
    results["start-up"] = dataclasses.asdict(rows)
    results["turning"] = [index for index, rope in enumerate(splicer.geometry.params) if rope.inv_freq.any()]
    row = runner.req_to_token_pool.req_to_token[PADDING_ROW]
    with borrow_slots(view, 3, NUM_TOKENS, row) as slots, torch.no_grad():
        bench = Bench(runner, path, slots)
        for name, runs in CASES.items():
            results[name] = bench.measure(runs, shift=0)
            results[f"{name}, shifted"] = bench.measure(runs, shift=SHIFT)
        runs = CASES["a run longer than the window"]
        one = dataclasses.replace(geometry, params=(geometry.params[0],) * len(geometry.params))
        path.splicer = Splicer(view, one)
        results["one rotation for all"] = bench.measure(runs, shift=SHIFT)
        path.splicer = splicer
        for layer in layers:
            layer.sliding_window_size, layer.use_irope = -1, False
        if view.index_rows:
            runner.attn_backend.sparse.topk_blocks = NUM_TOKENS
        results["no windows"] = bench.measure(runs, shift=0)
    return results


@pytest.fixture(
    scope="module",
    params=[
        ("tiny-gemma3", 1),
        ("tiny-gpt-oss", 16),
        ("tiny-cohere2", 1),
        ("tiny-mimo", 16),
        ("tiny-llama4", 16),
        ("tiny-minimax", 1),
    ],
    ids=lambda setup: setup[0],
)
def found(request: pytest.FixtureRequest, model_dir: Callable[[str], Path]) -> dict[str, Any]:
    """What `run_cases` finds, in one process a model."""
    name, page_size = request.param
    server = {"dtype": "float32", "page_size": page_size, "max_running_requests": 4}
    return {"name": name, **on_live_model(run_cases, model_dir(name), **server)}


@pytest.mark.feature("Cohere2ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "Llama4ForConditionalGeneration")
@pytest.mark.feature("MiMoV2ForCausalLM", "MiniMaxM3SparseForCausalLM")
@pytest.mark.feature("attention in chunks", "block-sparse attention with an indexer")
@pytest.mark.parametrize("case", CASES)
def test_a_splice_at_shift_zero_is_a_full_prefill(found: dict[str, Any], case: str) -> None:
    """In float32, over the whole vocabulary; runs were given other tokens, so that nothing computes them again."""
    measured = found[case]
    assert abs(measured["kl"]) <= 1e-5
    assert measured["rows"] <= 1e-4
    assert measured["same_token"]


@pytest.mark.feature("Gemma3RotaryEmbedding", "YaRNScalingRotaryEmbedding")
@pytest.mark.parametrize("case", CASES)
def test_rows_moved_from_elsewhere_are_those_computed_here(found: dict[str, Any], case: str) -> None:
    """Donors are the same text 1,000 positions on; each layer's keys turn back by that layer's rotation."""
    measured = found[f"{case}, shifted"]
    assert abs(measured["kl"]) <= 1e-5
    assert measured["rows"] <= 1e-3
    assert measured["same_token"]


def test_windows_and_rotations_are_read_layer_by_layer(found: dict[str, Any]) -> None:
    in_turn = [WINDOW, -1, WINDOW, -1]
    windows, rotary, rotations, turning = {
        "tiny-cohere2": (in_turn, "RotaryEmbedding", [[0, 1, 2, 3]], [0, 2]),
        "tiny-gemma3": ([WINDOW, WINDOW, -1, WINDOW], "Gemma3RotaryEmbedding", [[0, 1, 3], [2]], [0, 1, 2, 3]),
        "tiny-gpt-oss": (in_turn, "YaRNScalingRotaryEmbedding", [[0, 1, 2, 3]], [0, 1, 2, 3]),
        # Chunks are no windows.
        "tiny-llama4": ([-1] * 4, "RotaryEmbedding", [[0, 1, 2], [3]], [0, 1, 2]),
        "tiny-mimo": (in_turn, "RotaryEmbedding", [[0, 2], [1, 3]], [0, 1, 2, 3]),
        "tiny-minimax": ([-1] * 4, "RotaryEmbedding", [[0, 1, 2, 3]], [0, 1, 2, 3]),
    }[found["name"]]
    assert found["windows"] == windows
    assert found["rotations"] == rotations
    assert rotary in found["rotary"]
    assert found["turning"] == turning
    # Its module says nothing: keys that turn are told from others by measuring.
    assert found["start-up"]["unrotated_layers"] == ((1, 3) if found["name"] == "tiny-cohere2" else ())
    assert found["start-up"]["keys"] < 1e-3
    assert found["start-up"]["unmoved_keys"] > 0.1


def test_a_wrong_window_and_a_wrong_rotation_show(found: dict[str, Any]) -> None:
    """By far: no rounding looks like them."""
    assert found["no windows"]["kl"] > 1e-2
    if found["name"] not in ("tiny-gpt-oss", "tiny-minimax"):  # which have one
        assert found["one rotation for all"]["rows"] > 0.1
        assert found["one rotation for all"]["kl"] > 1e-3
