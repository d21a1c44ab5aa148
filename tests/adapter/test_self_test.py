"""The start-up self-test on live models: a healthy splicer passes, wrong ones are caught by it alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.adapter.processes import on_live_model
from tests.adapter.self_test_driver import run_cases

# Model, dtype, page size.
_SETUPS = [("tiny-gqa", "float32", 16), ("tiny-gqa", "bfloat16", 1), ("tiny-mla", "bfloat16", 16)]
_FAULTS = ["wrong base", "wrong layout", "mscale twice"]
_CASES = ["healthy", "no tokenizer", *_FAULTS, "not hooked", "nothing to splice", "small pool"]


def drive(model: Path, dtype: str, page_size: int, *wanted: str) -> dict[str, Any]:
    """The results of `run_cases`, one process each."""
    server = {"dtype": dtype, "page_size": page_size, "max_running_requests": 4}
    results: dict[str, Any] = on_live_model(partial(run_cases, wanted=wanted), model, **server)
    return results


@pytest.fixture(scope="module", params=_SETUPS, ids=lambda setup: "-".join(map(str, setup)))
def results(request: pytest.FixtureRequest, model_dir: Callable[[str], Path]) -> dict[str, Any]:
    name, dtype, page_size = request.param
    return drive(model_dir(name), dtype, page_size, *_CASES)


def test_a_right_splicer_is_exact_and_leaves_nothing_behind(results: dict[str, Any]) -> None:
    """Random weights take no splice from another context, so only exactness can be asked of them."""
    exact = results["no tokenizer"]
    assert exact["verdict"] == "passed", exact["reasons"]
    for case in ("healthy", "no tokenizer"):
        measured = results[case]["measured"]
        assert measured["moved"]["kl_nats"] < 0.02
        assert measured["moved"]["key_error"] < 0.03
        assert measured["naive"]["first_key_error"] > 0.5
        assert measured["reordered"]["kl_nats"] < 0.7 * measured["naive"]["kl_nats"]
        assert results[case]["is_exact"]
    assert all("reordered" in reason for reason in results["healthy"]["reasons"])
    assert results["left as found"]


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_wrong_splicer_is_caught(results: dict[str, Any], fault: str) -> None:
    """For what it is, not for what the model makes of another context."""
    assert results[fault]["verdict"] == "failed"
    assert results[fault]["reasons"][0].startswith("first-layer keys of moved prompts")
    assert "Rows are not moved as this model needs it" in results[fault]["reasons"][0]
    assert not results[fault]["is_exact"]


def test_a_pass_that_does_not_splice_is_no_exact_splice(results: dict[str, Any]) -> None:
    """It computes the whole prompt, which would be right if it were given the prompt."""
    assert (results["not hooked"]["verdict"], results["not hooked"]["is_exact"]) == ("failed", False)


def test_a_prompt_of_which_the_settings_leave_nothing_is_skipped_with_the_reason(results: dict[str, Any]) -> None:
    skipped = results["nothing to splice"]
    assert (skipped["verdict"], skipped["measured"]) == ("skipped", None)
    assert skipped["reasons"][0].startswith("core.sink_tokens=400 and core.seam_tokens=32 leave nothing")


def test_a_pool_too_small_is_skipped_with_the_size_it_needs(results: dict[str, Any]) -> None:
    skipped = results["small pool"]
    assert skipped["verdict"] == "skipped"
    assert skipped["reasons"][0].startswith("a KV pool of 512 tokens is too small: give --max-total-tokens ")


def test_a_trained_model_takes_splices_from_another_context(model_dir: Callable[[str], Path]) -> None:
    results = drive(model_dir("smollm2"), "bfloat16", 16, "healthy", "tight limits", "mscale twice")
    healthy = results["healthy"]
    assert healthy["verdict"] == "passed", healthy["reasons"]
    assert healthy["measured"]["reordered"]["same_top1"] == 3
    assert healthy["measured"]["naive"]["kl_nats"] > 10 * healthy["measured"]["reordered"]["kl_nats"]
    assert results["tight limits"]["verdict"] == "failed"
    assert all("reordered" in reason for reason in results["tight limits"]["reasons"])
    assert results["tight limits"]["is_exact"], "a matter of tolerance"
    # The smallest of the faults; the tiny models show the others.
    assert results["mscale twice"]["verdict"] == "failed"
    assert not results["mscale twice"]["is_exact"]
    assert results["page ends"]["read"] > 0, "prompts that end inside a page"
    assert results["page ends"]["nan"] == 0
