"""What the start-up self-test does to a real server: refuse, warn, say what it found, or stay away."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_pic.errors import BenchError
from tests.e2e.serving import serve

pytestmark = pytest.mark.e2e

# No splice from another context is this close, so a model fails whose rows are moved rightly.
TIGHT = {"self_test_key_limit": 1e-9, "self_test": "warn"}


def test_refuse_stops_the_server_with_one_line(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    with (
        pytest.raises(BenchError),
        serve(model_dir("tiny-gqa"), tmp_path, config={**TIGHT, "self_test": "refuse"}),
    ):
        pytest.fail("the server came up")
    (log,) = tmp_path.glob("*.log")
    errors = [line for line in log.read_text(errors="replace").splitlines() if "sglang_pic: self-test failed: " in line]
    assert len(errors) == 1
    assert "allowed is 1e-09 (unrotated" in errors[0]
    assert "self_test_key_limit" in errors[0]


def test_warn_serves_and_says_what_it_found_everywhere(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Two ranks, which run the same passes and agree."""
    with serve(model_dir("tiny-gqa"), tmp_path, "--tp-size", "2", config=TIGHT) as client:
        (state,) = json.loads(client.server.get("/server_info"))["internal_states"]
        found = state["pic"]["self_test"]
        assert found["verdict"] == "failed"
        assert found["measured"]["moved"]["kl_nats"] < 0.02
        counters = client.counters()
        assert counters["self_test_passed"] == 0
        assert counters["self_test_kl_nats"] == pytest.approx(found["measured"]["reordered"]["kl_nats"])
        assert counters["self_test_key_error_ratio"] > 0
        assert len(client.generate(list(range(1_000, 1_100))).ids) == 8
    (log,) = tmp_path.glob("*.log")
    text = log.read_text(errors="replace")
    assert "sglang_pic: self-test failed in" in text
    assert "sglang_pic: self-test failed: " in text


def test_off_runs_nothing(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    with serve(model_dir("tiny-gqa"), tmp_path, config={"self_test": "off"}) as client:
        (state,) = json.loads(client.server.get("/server_info"))["internal_states"]
        assert state["pic"]["self_test"]["verdict"] == "off"
        assert not [name for name in client.counters() if name.startswith("self_test")]
    (log,) = tmp_path.glob("*.log")
    assert "self-test" not in log.read_text(errors="replace")
