"""What the start-up self-test does to a real server: refuse, warn, say what it found, or stay away."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_pic.errors import BenchError
from tests.conftest import ROOT
from tests.e2e.servers import on_servers
from tests.e2e.serving import Client, serve

pytestmark = pytest.mark.e2e


def test_refuse_stops_the_server_with_one_line(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    # No splice from another context is as close as this limit, so a model fails whose rows are moved rightly.
    config = {"self_test": "refuse", "self_test_key_limit": 1e-9}
    with pytest.raises(BenchError), serve(model_dir("tiny-gqa"), tmp_path, config=config):
        pytest.fail("the server came up")
    (log,) = tmp_path.glob("*.log")
    errors = [line for line in log.read_text(errors="replace").splitlines() if "sglang_pic: self-test failed: " in line]
    assert len(errors) == 1
    assert "allowed is 1e-09 (unrotated" in errors[0]
    assert "self_test_key_limit" in errors[0]


@on_servers("gqa_page1_tp2")
def test_warn_serves_and_says_what_it_found_everywhere(client: Client) -> None:
    """Two ranks, which run the same passes and agree."""
    found = client.internal_state()["self_test"]
    assert found["verdict"] == "failed"
    assert found["measured"]["moved"]["kl_nats"] < 0.02
    counters = client.counters()
    assert counters["self_test_passed"] == 0
    assert len(client.generate(list(range(1_000, 1_100))).ids) == 8
    certificate = client.internal_state()["certificate"]
    assert (certificate["fits"], counters["certificate_fits"]) == (False, 0)
    here = certificate["here"]
    assert (here["dtype"], here["page_size"], here["settings"]["sink_tokens"]) == ("float32", 1, 32)
    assert len(here["weights"]) == 64
    log = client.log()
    said = "certificate does not fit: 'lost.json': No such file"
    assert certificate["said"].startswith(said)
    assert log.count(f"sglang_pic: {said}") == 1, "one rank says it"
    assert "sglang_pic: self-test failed in" in log
    assert "sglang_pic: self-test failed: " in log


@on_servers("text")
def test_off_runs_nothing(client: Client) -> None:
    assert client.internal_state()["self_test"]["verdict"] == "off"
    assert not [name for name in client.counters() if name.startswith("self_test")]
    assert "self-test" not in client.log()


@on_servers("gqa_page1_tp2")
def test_what_the_board_and_the_rules_read_is_exported(client: Client) -> None:
    """Here, because a server without a self-test lacks its metrics."""
    client.generate(list(range(1_000, 1_100)))
    monitoring = ROOT / "sglang_pic" / "monitoring"
    shown = [(monitoring / name).read_text() for name in ("rules.yaml", "grafana/sglang-pic.json")]
    wanted = {name for text in shown for name in re.findall(r"sglang:\w+", text)}
    exported = set(re.findall(r"sglang:\w+", client.server.get("/metrics")))
    # Off by default.
    elsewhere = ("sglang:pic_tenant_",)
    assert {name for name in wanted - exported if not name.startswith(elsewhere)} == set()
    assert len(wanted) > 20
