"""Layers with sliding windows in a plain pool: a splice is exact wherever the edge of a window lies.

Live models of two families: Gemma 3, whose layers with windows have a rotation of their own, and gpt-oss, with sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.adapter.processes import on_live_model
from tests.adapter.window_driver import CASES, NUM_TOKENS, WINDOW, run_cases


def edges(runs: tuple[tuple[int, int], ...]) -> set[str]:
    """Where windows of computed tokens begin: in a run or in a gap."""
    spliced = {at for start, end in runs for at in range(start, end)}
    computed = [at for at in range(WINDOW, NUM_TOKENS) if at not in spliced]
    return {"run" if at - WINDOW in spliced else "gap" for at in computed}


def test_the_cases_are_what_they_are_called() -> None:
    longest = max(end - start for start, end in CASES["a run longer than the window"])
    assert longest > 2 * WINDOW
    assert all(end - start < WINDOW for start, end in CASES["a run shorter than the window"])
    for name in ("edge in a run", "edge in a gap", "edge in a seam", "edges everywhere"):
        assert edges(CASES[name]) == {"run", "gap"}
    # The first tokens behind the first run, and what they see first.
    assert 100 <= 150 - WINDOW < 150
    assert 80 <= 140 - WINDOW < 100
    assert 90 <= 140 - WINDOW < 96


@pytest.fixture(scope="module", params=[("tiny-gemma3", 1), ("tiny-gpt-oss", 16)], ids=lambda setup: setup[0])
def found(request: pytest.FixtureRequest, model_dir: Callable[[str], Path]) -> dict[str, Any]:
    """What `run_cases` finds, in one process a model."""
    name, page_size = request.param
    server = {"dtype": "float32", "page_size": page_size, "max_running_requests": 4, "disable_hybrid_swa_memory": True}
    return {"name": name, **on_live_model(run_cases, model_dir(name), **server)}


@pytest.mark.feature("Gemma3ForCausalLM", "GptOssForCausalLM")
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
    gemma = found["name"] == "tiny-gemma3"
    assert found["windows"] == ([WINDOW, WINDOW, -1, WINDOW] if gemma else [WINDOW, -1, WINDOW, -1])
    assert found["rotations"] == ([[0, 1, 3], [2]] if gemma else [[0, 1, 2, 3]])
    assert ("Gemma3RotaryEmbedding" if gemma else "YaRNScalingRotaryEmbedding") in found["rotary"]
    assert found["start-up"]["keys"] < 1e-3
    assert found["start-up"]["unmoved_keys"] > 0.1


def test_a_wrong_window_and_a_wrong_rotation_show(found: dict[str, Any]) -> None:
    """By far: no rounding looks like them."""
    assert found["no windows"]["kl"] > 1e-2
    if found["name"] == "tiny-gemma3":
        assert found["one rotation for all"]["rows"] > 0.1
        assert found["one rotation for all"]["kl"] > 1e-3
