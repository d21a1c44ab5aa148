"""TRACE: passes over a cache that lives on, what is served again, and what adds up."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path

import pytest
from fidelity_records import Asked, StandIn, parse
from pic_bench.fidelity import runner
from pic_bench.fidelity.arms import EXACT, Arm, parse_policy
from pic_bench.fidelity.cases.calls import Call
from pic_bench.fidelity.cases.case import Case
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.folder import read_probes
from pic_bench.fidelity.passes import Passes, PassRun, Vault
from pic_bench.fidelity.plan import make_plan
from pic_bench.fidelity.record import Experiment, Probe
from pic_bench.fidelity.runner import run_fidelity
from pic_bench.fidelity.target import Recorded

from sglang_pic.errors import BenchError


@pytest.fixture(scope="module")
def text(model_dir: Callable[[str], Path]) -> ModelText:
    return ModelText(model_dir("smollm2"))


class Cache(StandIn):
    """A server whose cache lives on: what it is asked, pass by pass, as key, arm and number of tokens."""

    def __init__(self, *, prefix: int = 0, vocab: int = 200) -> None:
        super().__init__(prefix=prefix, vocab=vocab)
        self.passes: list[list[tuple[str, str, int]]] = [[]]

    def flush(self) -> None:
        self.passes.append([])

    def answer(self, asked: Asked) -> Recorded:
        self.passes[-1].append((asked.key, asked.arm.name, len(asked.prompt) + len(asked.gold)))
        return super().answer(asked)

    def serve(self, tokens: list[int], arm: Arm, *, key: str) -> None:
        self.passes[-1].append((key, arm.name, len(tokens)))


Pairs = AbstractSet[tuple[str, str]]
Serve = Callable[..., list[Probe]]


@pytest.fixture
def serve(tmp_path: Path, text: ModelText) -> Serve:
    """The records of passes on a stand-in, which an earlier run left some of."""

    def serve(passes: Passes, server: Cache, done: Pairs = frozenset()) -> list[Probe]:
        run = PassRun(passes, server, text, Vault(tmp_path / "vault"), "float32", done)
        return [record for step in run.steps() for record in step.probes]

    return serve


@pytest.fixture
def trace() -> Passes:
    """A trace of six calls, of which the three longer ones are measured, under two policies in two orders."""
    calls = []
    for n in range(6):
        prompt, answer = list(range(60 + 100 * (n % 2))), list(range(20 + 20 * n))
        case = Case(experiment=Experiment.TRACE, name=f"{n:03}-000", source="s", prompt=prompt, gold=answer[:32])
        calls.append(Call(n, case, answer))
    first, more = parse_policy("default"), parse_policy("more=tail:0")
    orders = ("recorded", "reversed")
    return Passes(source="s", calls=calls, arms=(EXACT, more), orders=orders, finder=first, min_chunk_hit=64)


def arms_of(probes: Iterable[Probe]) -> list[tuple[str, str]]:
    return [(record.prompt, record.arm) for record in probes]


def test_a_full_prefill_that_was_served_cached_tokens_is_refused(serve: Serve, trace: Passes) -> None:
    with pytest.raises(BenchError, match="a full prefill was served 3 cached tokens"):
        serve(trace, Cache(prefix=3))


def test_every_pass_over_a_trace_fills_the_cache_alike(serve: Serve, trace: Passes) -> None:
    server = Cache()
    probes = serve(trace, server)
    assert len({*arms_of(probes)}) == len(probes) == 2 * 3 * 5
    alone = {key for one in server.passes for key, *_ in one if key != "pass"}
    assert len(alone) == 2 * 3, "a full prefill, once and again, meets nobody's rows"
    passes = [[tokens for key, _, tokens in one if key == "pass"] for one in server.passes[1:]]
    found, exact, more = passes[::2]
    assert found == exact == more
    assert passes[1::2] == [passes[1]] * 3 != passes[::2]


def test_a_trace_goes_on_without_what_an_earlier_run_kept(tmp_path: Path, serve: Serve, trace: Passes) -> None:
    probes = serve(trace, Cache())
    shutil.rmtree(tmp_path / "vault")
    again = serve(trace, Cache(), frozenset(arms_of(p for p in probes if p.arm != "more")))
    assert arms_of(again) == arms_of(p for p in probes if p.arm == "more")


def test_a_run_serves_traces_once(
    tmp_path: Path, model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "--experiment trace --quick --dtype float32 --calls 3"
    config = parse(f"{line} --policy default --model {model_dir('smollm2')}")
    plan = make_plan(config)
    starts = []

    @contextmanager
    def serve(*_: object, **__: object) -> Iterator[Cache]:
        starts.append(Cache(vocab=49_152))
        yield starts[-1]

    monkeypatch.setattr(runner, "serve_target", serve)
    first = run_fidelity(plan, tmp_path, start_timeout_s=1, quiet=True)
    probes = read_probes(tmp_path)
    assert {probe.arm for probe in probes} == {"full", "retest", "exact", "default", "naive"}
    assert len(probes) == len({(probe.experiment, probe.prompt, probe.arm) for probe in probes})
    # A call with its controls, in the exact pass and in the naive one.
    assert first.measured == 3 * len({probe.prompt for probe in probes})
    assert not (tmp_path / "vault/float32").exists()
    again = run_fidelity(plan, tmp_path, start_timeout_s=1, quiet=True)
    assert (again.measured, len(starts)) == (0, 1)
