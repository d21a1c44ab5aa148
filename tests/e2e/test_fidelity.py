"""The whole commands on a real server: the floor is the floor, and `tune` gives a verdict."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from pic_bench.compare.arms import build_arms
from pic_bench.compare.server import Server
from pic_bench.fidelity.config import read_probes
from pic_bench.fidelity.record import Probe, read_lines
from pic_bench.out_folder import read_json
from pic_bench.serving import generate, serving
from pic_bench.tune import ladder
from pic_bench.tune.config import Sample
from pic_generate.vocabulary import make_text

from sglang_pic.cli import main
from sglang_pic.core import CoreConfig

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("quick_servers")]


@pytest.mark.slow
def test_a_trace_is_measured_on_an_mla_model(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Random weights answer nothing, but every path is gone through, also those of latent rows."""
    out, trace_file = tmp_path / "run", tmp_path / "clock.jsonl"
    write_trace(trace_file)
    command = ["fidelity", "--model", str(model_dir("tiny-mla")), "--out", str(out), "--dtype", "float32", "--quick"]
    command += ["--data", str(trace_file), "--max-total-tokens", "8000", "--quiet"]
    command += ["--policy", "default", "--policy", "seam-8=seam:8"]
    assert main(command) == 0
    trace = {(probe.prompt, probe.arm): probe for probe in read_probes(out)}
    # The first call finds nothing; the second has the body behind another clock; the third goes on with the second.
    assert {name for name, _ in trace} == {"001-000"}
    assert {arm for _, arm in trace} == {"full", "retest", "exact", "naive", "default", "seam-8"}
    default, seam, exact = (trace["001-000", arm] for arm in ("default", "seam-8", "exact"))
    assert default.chunk_hit_tokens >= 256
    more = seam.chunk_hit_tokens - default.chunk_hit_tokens
    assert 0 < more <= CoreConfig().seam_tokens - 8, "of one run's seam, as far as it was computed for nothing else"
    assert exact.chunk_hit_tokens == trace["001-000", "full"].prefix_hit_tokens == 0
    assert exact.prefix_hit_tokens == default.prefix_hit_tokens > 0
    assert exact.kl < 1e-6 < default.kl


@pytest.mark.slow
def test_settings_are_measured_up_to_a_verdict(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights bear no splice from another context, so that the defaults end the ladder of `tune`."""
    out, model = tmp_path / "run", str(model_dir("tiny-gqa"))
    trace = "gen:agent_meta?header=50&body=1400&calls=3&sessions=3&seed=3"
    command = ["tune", trace, "--model", model, "--sessions", "3", "--quiet", "--out"]
    assert main([*command, str(out), "--dtype", "float32", "--max-total-tokens", "40000"]) == 1
    losses = {(probe.prompt, probe.arm): probe for probe in read_lines(out / "losses.jsonl", Probe)}
    exact = [probe for (_, arm), probe in losses.items() if arm == "exact"]
    assert {arm for _, arm in losses} == {"full", "exact", "naive", "flipped", "careful"}
    assert len(exact) == 5, "one more of each session with a changed field, where another was drawn"
    assert all(probe.kl < 1e-6 and probe.prefix_hit_tokens == probe.prompt_tokens // 2 for probe in exact)
    served = json.loads((out / "served.json").read_text())
    assert (served["model"], served["dtype"], len(served["weights"])) == ("tiny-gqa", "float32", 64)
    assert "Nothing is certified: " in (out / "report.md").read_text()

    reuse = read_json(out / "sample.json", Sample, "a sample").reuse
    monkeypatch.setattr(ladder, "survey", lambda *_, **__: reuse)
    # A server that runs says the same beside requests of its own, some of which share a pass, and keeps its cache.
    config = {"cost_gate": "off", "self_test": "off", "audit_rate": 0.0, "certificate": str(tmp_path / "none.json")}
    (arm,) = build_arms(["pic"], server_args=(), pic_config=json.dumps(config))
    probe = {"request_options": True, "record_dir": str(tmp_path / "logits")}
    flags = ("--dtype", "float32", "--max-total-tokens", "240000", "--chunked-prefill-size", "-1")
    with serving(model, arm, tmp_path, flags=flags, probe=probe) as server:
        theirs, run_ends = [generate(server, list(range(100, 400)), with_logprobs=False)], Event()
        with ThreadPoolExecutor(1) as pool:
            user = pool.submit(_use, server, run_ends)
            try:
                assert main([*command, str(tmp_path / "beside"), "--base-url", server.base_url]) == 1
            finally:
                run_ends.set()
            assert user.result() > 10, "it was served beside others"
        theirs.append(generate(server, list(range(100, 400)), with_logprobs=False))
        assert [answer.cached_tokens for answer in theirs] == [0, 299]
    beside = {(probe.prompt, probe.arm): probe for probe in read_lines(tmp_path / "beside" / "losses.jsonl", Probe)}
    assert beside.keys() == losses.keys()
    for name, found in beside.items():
        hits = found.prefix_hit_tokens, found.chunk_hit_tokens
        assert hits == (losses[name].prefix_hit_tokens, losses[name].chunk_hit_tokens), name
        assert found.forced_kl == pytest.approx(losses[name].forced_kl, rel=1e-3, abs=1e-6), name
    assert list((tmp_path / "logits").iterdir()) == []


def _use(server: Server, run_ends: Event) -> int:
    """Send short prompts, a pause between two, until a run ends; how many were answered."""
    for number in itertools.count(1):
        generate(server, [5 + number % 50] * 40, with_logprobs=False)
        if run_ends.wait(0.3):
            return number
    raise AssertionError


def write_trace(path: Path) -> None:
    """Two sessions that begin with one clock each; the second one's later call repeats its whole first one."""
    body = make_text(random.Random(0), 450)
    with path.open("w") as file:
        for clock in ("It is noon.", "It is a quarter past six in the evening, and it rains."):
            messages = [
                {"role": "system", "content": f"{clock} {body}"},
                {"role": "user", "content": "Go on."},
                {"role": "assistant", "content": "The river runs along the meadow and the road follows it."},
                {"role": "user", "content": "And then?"},
                {"role": "assistant", "content": "It ends at the sea."},
            ]
            session = {"session_id": clock, "messages": messages, "turns": [2, 4] if "rains" in clock else [2]}
            file.write(json.dumps(session) + "\n")
