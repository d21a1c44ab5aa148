"""A run's folder, what is refused and what is gone on with; passes over a cache that lives on."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from pic_bench.fidelity import runner
from pic_bench.fidelity.arms import EXACT, Arm, parse_policy
from pic_bench.fidelity.cases.case import Case
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.config import claim_run, read_probes
from pic_bench.fidelity.passes import Call, Passes, PassRun, Vault
from pic_bench.fidelity.record import Probe
from pic_bench.fidelity.target import Recorded
from pic_bench.out_folder import write_json

from sglang_pic.cli import main
from sglang_pic.errors import BenchError, ConfigError
from tests.helpers.fidelity_records import Asked, StandIn, parse

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--calls 0", "calls"),
        ("--policy exact", "policy"),
    ],
)
def test_what_cannot_be_measured_is_refused(line: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(line)


def test_a_folder_is_new_or_an_earlier_run_that_is_spoken_of(tmp_path: Path) -> None:
    config, folder = parse("--quick"), tmp_path / "run"
    claim_run(folder, config, resume=False, force=False)
    write_json(folder / "config.json", config)
    (folder / "probes.jsonl").write_bytes(b'{"whole": 1}\n{"cut')
    with pytest.raises(ConfigError, match="--resume or --force"):
        claim_run(folder, config, resume=False, force=False)
    with pytest.raises(ConfigError, match="another run than this command: calls is 6 there and 1 here"):
        claim_run(folder, msgspec.structs.replace(config, calls=1), resume=True, force=False)
    claim_run(folder, config, resume=True, force=False)
    assert (folder / "probes.jsonl").read_bytes() == b'{"whole": 1}\n', "a record must begin on a line of its own"
    (folder / "probes.jsonl.gz").write_bytes(gzip.compress((folder / "probes.jsonl").read_bytes()))
    (folder / "probes.jsonl").unlink()
    claim_run(folder, config, resume=True, force=False)
    assert (folder / "probes.jsonl").read_bytes() == b'{"whole": 1}\n', "new records would hide those that are packed"
    assert not (folder / "probes.jsonl.gz").exists()
    (folder / "probes.jsonl.gz").touch()
    claim_run(folder, config, resume=False, force=True)
    assert list(folder.iterdir()) == []
    (folder / "mine.txt").write_text("text")
    for other, why in ((folder, "no earlier fidelity run"), (folder / "mine.txt", "is a file")):
        with pytest.raises(ConfigError, match=why):
            claim_run(other, config, resume=False, force=True)
    assert (folder / "mine.txt").exists()


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
    """A trace of six calls, of which the three longer ones are measured, under two policies."""
    calls = []
    for n in range(6):
        prompt, answer = list(range(60 + 100 * (n % 2))), list(range(20 + 20 * n))
        case = Case(name=f"{n:03}-000", source="s", prompt=prompt, gold=answer[:32])
        calls.append(Call(n, case, answer))
    first, more = parse_policy("default"), parse_policy("more=tail:0")
    return Passes(source="s", calls=calls, arms=(EXACT, more), finder=first, min_chunk_hit=64)


def arms_of(probes: Iterable[Probe]) -> list[tuple[str, str]]:
    return [(record.prompt, record.arm) for record in probes]


def test_every_pass_over_a_trace_fills_the_cache_alike(serve: Serve, trace: Passes) -> None:
    server = Cache()
    probes = serve(trace, server)
    assert len({*arms_of(probes)}) == len(probes) == 3 * 5
    alone = {key for one in server.passes for key, *_ in one if key != "pass"}
    assert len(alone) == 2 * 3, "a full prefill, once and again, meets nobody's rows"
    passes = [[tokens for key, _, tokens in one if key == "pass"] for one in server.passes[1:]]
    found, exact, more = passes
    assert found == exact == more


def test_a_run_serves_traces_once(
    tmp_path: Path, model_dir: Callable[[str], Path], monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that ends leaves its records, and the run goes on with the calls that lack some."""
    out, starts = tmp_path / "run", list[Cache]()
    command = ["fidelity", "--quick", "--dtype", "float32", "--calls", "3", "--policy", "default", "--quiet"]
    command += ["--model", str(model_dir("smollm2")), "--out", str(out)]

    class Mortal(Cache):
        def answer(self, asked: Asked) -> Recorded:
            if len(starts) == 1 and asked.arm.name == "naive":
                raise BenchError("the server was ended by signal 9")
            return super().answer(asked)

    @contextmanager
    def serve(*_: object, **__: object) -> Iterator[Cache]:
        starts.append(Mortal(vocab=49_152))
        yield starts[-1]

    monkeypatch.setattr(runner, "serve_target", serve)
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "sglang-pic: error: the server was ended by signal 9" in error
    assert f"what was measured stays in {out}; go on with --resume" in error
    measured = read_probes(out)
    assert {probe.arm for probe in measured} == {"full", "retest", "exact", "default"}
    assert main([*command, "--resume"]) == 0
    probes = read_probes(out)
    assert probes[: len(measured)] == measured
    assert {probe.arm for probe in probes[len(measured) :]} == {"naive"}
    assert len(probes) == len({(probe.prompt, probe.arm) for probe in probes}) == 3 * 5
    assert not (out / "vault/float32").exists()
    assert main([*command, "--resume"]) == 0
    assert len(starts) == 2
