"""`tune`: what is drawn and served, where the ladder ends, and what is written, on a stand-in for the server."""

from __future__ import annotations

import json
import random
import re
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pic_bench.compare.server import Server as CompareServer
from pic_bench.fidelity.arms import Arm
from pic_bench.fidelity.passes import Call, session_calls
from pic_bench.fidelity.record import Probe, read_lines
from pic_bench.fidelity.target import Recorded
from pic_bench.tune import climb, ladder, sample
from pic_bench.tune.config import CAP, Sample
from pic_bench.tune.report import Summary, summarize
from pic_bench.tune.running import attach
from pic_bench.tune.verdict import Judge, Verdict
from pic_generate.vocabulary import make_text

from sglang_pic.certificate import check_certificate, policy_settings, read_certificate
from sglang_pic.cli import main
from sglang_pic.config import load_config
from sglang_pic.errors import BenchError
from tests.helpers.certificates import SERVED
from tests.helpers.fidelity_records import Asked, StandIn, probe

LOSSES = {"full": 0.0, "exact": 1e-4, "naive": 1.0, "careful": 1e-3, "seam-32": 2e-3, "any-order": 4e-3}
LOSSES["no-tail"] = 0.02
VOCAB = 64
REUSE = {"careful": 0.2, "seam-32": 0.3, "balanced": 0.302, "any-order": 0.36, "no-tail": 0.4, "most": 0.7}


class Server(StandIn):
    """Loses about as much as `LOSSES` says."""

    def __init__(self) -> None:
        super().__init__(vocab=VOCAB)
        self.server = self
        self.rng = np.random.default_rng(0)
        self.passes: list[str] = [""]

    def get(self, _path: str) -> str:
        return json.dumps({"internal_states": [{"pic": {"certificate": {"here": msgspec.to_builtins(SERVED)}}}]})

    def flush(self) -> None:
        self.passes.append("")

    def greedy(self, _prompt: list[int], num_tokens: int, *, key: str) -> list[int]:
        return [1] * num_tokens

    def serve(self, tokens: list[int], arm: Arm, *, key: str) -> None:
        """Nothing is recorded of an answer, and of half a prompt."""

    def answer(self, asked: Asked) -> Recorded:
        self.passes[-1] = asked.arm.name
        recorded = super().answer(asked)
        about = LOSSES[asked.arm.name]
        # KL of two nearly even distributions is half the variance of their logits' difference.
        spread = (2 * about * self.rng.lognormal(0, 0.3)) ** 0.5
        noise = spread * self.rng.standard_normal(recorded.logits.shape)
        prefix = len(asked.prompt) // 2 if asked.arm.name == "exact" else 0
        return Recorded(noise.astype(np.float32), prefix, recorded.chunk_hit_tokens)


Patch = pytest.MonkeyPatch
Tune = Callable[..., tuple[int, Summary]]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    started: list[Server] = []

    @contextmanager
    def serve(*_: object, **__: object) -> Iterator[Server]:
        started.append(Server())
        yield started[-1]

    def calls(*args: Any) -> Iterator[Call]:
        """Whose answers are of ids that the stand-in's logits have."""
        for call in session_calls(*args):
            yield replace(call, case=replace(call.case, gold=[token % VOCAB for token in call.case.gold]))

    monkeypatch.setattr(sample, "session_calls", calls)
    monkeypatch.setattr(climb, "serve_target", serve)
    monkeypatch.setattr(ladder, "survey", lambda *_, **__: REUSE)
    return started


@pytest.fixture
def tune(tmp_path: Path, model_dir: Callable[[str], Path], servers: list[Server]) -> Tune:
    """A run on 60 recorded sessions of two calls, and 20 requests without an answer."""
    rng, logs = random.Random(0), [tmp_path / "recorded.jsonl", tmp_path / "requests.jsonl"]
    with logs[0].open("w") as recorded, logs[1].open("w") as requests:
        for number in range(80):
            roles = ("user", "assistant", "user", "assistant") if number < 60 else ("user",)
            messages = [{"role": role, "content": make_text(rng, 2 if role == "assistant" else 20)} for role in roles]
            session = {"session_id": str(number), "messages": messages} | ({"turns": [1, 3]} if number < 60 else {})
            print(json.dumps(session), file=recorded if number < 60 else requests)

    def run(*words: str) -> tuple[int, Summary]:
        out = tmp_path / "run"
        named = ["--model", str(model_dir("smollm2")), "--out", str(out), "--quiet"]
        code = main(["tune", *map(str, logs), *named, *words])
        return code, summarize(out)

    return run


def test_the_ladder_is_climbed(
    tune: Tune, servers: list[Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the first rung that is not shown; what is certified is served as it was measured."""
    code, summary = tune("--sessions", "60", "--dtype", "float16", "--server-arg", "--kv-cache-dtype fp8_e4m3")
    assert (code, summary.certified) == (0, "any-order")
    verdicts = {rung.name: rung.verdict for rung in summary.rungs}
    shown = [name for name, verdict in verdicts.items() if verdict is Verdict.CERTIFIED]
    assert shown == ["careful", "seam-32", "any-order"]
    assert verdicts["no-tail"] in (Verdict.HOPELESS, Verdict.OVER)
    assert [verdicts[name] for name in ("balanced", "most")] == [Verdict.UNTRIED] * 2, "gains too little, too late"
    assert (summary.naive.verdict, summary.exact.verdict) == (Verdict.OVER, Verdict.CONTROL)
    assert servers[0].passes == ["exact", "naive", "careful", "seam-32", "any-order", "no-tail"]
    serve, said, *_ = capsys.readouterr().out.splitlines()
    variable, *words = shlex.split(serve)
    assert variable == f"SGLANG_PIC_CONFIG={tmp_path / 'run' / 'pic.json'}"
    measured = ["--dtype", "float16", "--kv-cache-dtype", "fp8_e4m3"]
    assert words == ["sglang", "serve", summary.config.model, "--radix-cache-backend", "pic", *measured]
    assert said.startswith(
        "On 30 of your sessions with smollm2, any-order reuses 36 % of what the prefix cache misses, at"
    )
    assert said.endswith("nats a token (95 %), not shown behind changed fields; the defaults 20 %.")


def test_a_certificate_fits_the_configuration_beside_it(tune: Tune, tmp_path: Path, monkeypatch: Patch) -> None:
    _, summary = tune()
    monkeypatch.setenv("SGLANG_PIC_CONFIG", str(tmp_path / "run" / "pic.json"))
    config = load_config()
    assert (config.core.seam_tokens, config.core.tail_tokens, config.core.reordered) == (32, 32, "splice")
    certificate = read_certificate(config.certificate)
    assert certificate.loss.low < certificate.loss.mean < certificate.loss.high < summary.config.budget
    assert certificate.changed_fields == "not shown"
    here = msgspec.structs.replace(SERVED, settings=policy_settings(config.core))
    assert check_certificate(config.certificate, here).fits
    assert not check_certificate(config.certificate, SERVED).fits
    records = read_lines(tmp_path / "run" / "losses.jsonl", Probe)
    arms = ("full", "exact", "careful", "any-order")
    first, *others = ({probe.prompt for probe in records if probe.arm == arm} for arm in arms)
    assert others == [first] * 3, "paired"
    assert len({(probe.prompt, probe.arm) for probe in records}) == len(records)
    page = (tmp_path / "run" / "report.md").read_text()
    assert summary.said in page
    assert "fails, as it must" in page


def test_a_run_that_is_broken_off_goes_on(tune: Tune, servers: list[Server], tmp_path: Path) -> None:
    code, summary = tune("--time-limit", "1e-9")
    assert (code, summary.certified) == (1, None)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert tune("--resume")[1].certified == "any-order"
    tune("--resume")
    assert len(servers) == 2, "nothing is missing"
    assert not (tmp_path / "run" / "vault").exists()


def test_too_few_sessions_certify_nothing_and_it_says_how_many_it_takes(tune: Tune) -> None:
    code, summary = tune("--sessions", "20")
    assert (code, summary.certified) == (1, None)
    assert 32 <= summary.needed <= 48
    assert f"20 of 80 sessions were measured, and it takes about {summary.needed} to show" in summary.said


@pytest.mark.parametrize(
    ("loss", "number", "verdict"),
    [
        (1e-3, 60, Verdict.CERTIFIED),
        (0.04, 60, Verdict.OVER_CHANGED),
        (9e-3, 60, Verdict.OPEN),
        (1e-3, 20, Verdict.CERTIFIED),
        (0.011, 20, Verdict.OPEN),
    ],
    ids=["little", "much", "too near to tell", "few, little", "few, more"],
)
def test_calls_behind_changed_fields_have_a_test_of_their_own(loss: float, number: int, verdict: Verdict) -> None:
    """Twenty sessions, of which ten certify, show nothing of a budget of .01 whatever they lose."""
    drawn, changed = ([f"{at:03}-00{call}" for at in range(60)] for call in (0, 1))
    about = Sample(
        **{"logged": 60, "sessions": 60, "calls": 120, "left_out": 0, "traffic": "", "reuse": {}},
        drawn=tuple(drawn),
        changed=tuple(changed[at] for at in range(0, 60, 60 // number)),
    )
    measured = [(name, 2e-3) for name in drawn] + [(name, loss) for name in about.changed]
    probes = [probe(arm="careful", prompt=name, forced_kl=kl, forced_agreement=1.0) for name, kl in measured]
    judge = Judge(about, 0.01, probes)
    rung = judge.judge("careful")
    assert (rung.verdict, rung.sessions, rung.changed) == (verdict, 30, number // 2)
    assert rung.loss.value == pytest.approx(2e-3), "those drawn from all, and no others"
    assert rung.changed_loss.value == pytest.approx(loss)
    needed = judge.needed("careful")
    if number == 60:
        assert (needed is None) == (loss > 0.01)
    assert not judge.is_decided("exact", may_fail=False)
    judge.probes = probes[:60]
    assert not judge.is_decided("careful", may_fail=False), "those behind changed fields are to come"


@pytest.mark.parametrize("flipped", [1.0, 1e-3])
def test_a_control_has_to_fail(tune: Tune, servers: list[Server], monkeypatch: Patch, flipped: float) -> None:
    """Where unrotated keys are right, because text stands where it did, rows of the wrong sign are not."""
    monkeypatch.setitem(LOSSES, "naive", 1e-3)
    monkeypatch.setitem(LOSSES, "flipped", flipped)
    code, summary = tune()
    assert servers[0].passes[:4] == ["exact", "naive", "flipped", "careful"]
    assert summary.rungs[0].verdict is Verdict.CERTIFIED
    assert (code, summary.certified is None) == ((0, False) if flipped == 1.0 else (1, True))
    if flipped < 1:
        assert "rows of the wrong sign were not shown to lose more" in summary.said


def info(**changed: Any) -> str:
    """What a server that is meant to be measured says of itself."""
    probe = {"switches": {"request_options": True, "record_dir": "."}, "is_idle": True} | changed
    here = {"here": msgspec.to_builtins(SERVED)}
    return json.dumps({"internal_states": [{"pic": {"probe": probe, "certificate": here}}]})


@pytest.mark.parametrize(
    ("said", "model", "why"),
    [
        (info(switches={"request_options": True, "record_dir": "/nowhere"}), "smollm2", "no logits to a folder"),
        (info(switches={"record_dir": "."}), "smollm2", "no logits to a folder"),
        ('{"internal_states": [{"pic": {}}]}', "smollm2", "was not started for this; start it with SGLANG_PIC_PROBE="),
        (info(), "another", "serves 'smollm2', not 'another'"),
        (info()[:-1].replace("[", "[" + info()[21:-2] + ", ") + "}", "smollm2", "has 2 replicas"),
    ],
)
def test_a_server_that_cannot_be_measured_is_refused(said: str, model: str, why: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(CompareServer, "get", lambda *_: said)
    with pytest.raises(BenchError, match=re.escape(why)):
        attach("http://127.0.0.1:1", f"models/{model}", until=0.0)


def test_a_server_is_asked_while_it_is_idle_and_again_where_a_user_came(tmp_path: Path, monkeypatch: Patch) -> None:
    """A user's requests run at first; another one shares the pass of the first attempt."""
    states, asked = [False, False, True, True], []
    folder = {"request_options": True, "record_dir": str(tmp_path)}

    def post(_: CompareServer, _path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked.append(body)
        name = body["sampling_params"]["custom_params"]["pic"]["testing"].get("record")
        if name and len(asked) > 1:
            np.savez(tmp_path / f"{name}.npz", logits=np.zeros((3, 4), np.float32))
        first, later = {"cached_tokens": 40, "cached_tokens_details": {"pic": 30}}, {"cached_tokens": 49}
        return {"output_ids": [1], "meta_info": {"prompt_tokens": 52, **(first if len(asked) == 1 else later)}}

    def get(*_: object) -> str:
        return info(switches=folder, is_idle=states.pop(0) if states else True)

    monkeypatch.setattr(CompareServer, "get", get)
    monkeypatch.setattr(CompareServer, "post", post)
    target = attach("http://127.0.0.1:1", "models/smollm2", until=time.monotonic() + 60)
    found = target.record([1] * 50, [2, 3], Arm(name="careful"), key="pass")
    assert (found.prefix_hit_tokens, found.chunk_hit_tokens) == (10, 30), "as it was served first"
    assert len(asked) == 2
    assert not states
    assert not list(tmp_path.iterdir())
    target.flush()
    target.serve([1] * 50, Arm(name="careful"), key="pass")
    keys = [body["extra_key"] for body in asked]
    assert keys[0] == keys[1] != keys[2], "a pass finds nothing of the one before it"
    assert not any(body["extra_key"] == "pass" for body in asked)
    states[:] = [False] * 9
    with pytest.raises(BenchError, match="had requests of its own until the time limit"):
        attach("http://127.0.0.1:1", "models/smollm2", until=0.0).serve([1], Arm(name="careful"), key="pass")


@pytest.mark.parametrize(
    "words",
    [
        ("--budget", "0"),
        ("--budget", str(CAP)),
        ("--budget", "nan"),
        ("--sessions", "1"),
        ("--time-limit", "0"),
        ("--base-url", "http://127.0.0.1:1", "--server-arg", "--tp 2"),
    ],
)
def test_values_that_mean_nothing_are_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    assert main(["tune", "sample:agents", "--model", "m", "--out", str(tmp_path / "run"), *words]) == 2
    assert not (tmp_path / "run").exists()


def test_a_log_that_is_named_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each session would come again, lose nothing as an exact hit, and count as another one."""
    log, where = tmp_path / "log.jsonl", ["--model", str(tmp_path), "--out", str(tmp_path / "run")]
    log.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    for twice in (log, tmp_path):
        assert main(["tune", str(log), str(twice), *where]) == 2
        assert "is named twice" in capsys.readouterr().err
