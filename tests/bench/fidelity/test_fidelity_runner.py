"""A run's folder, what is refused and what is gone on with; TRACE's passes over a cache that lives on."""

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
from pic_bench.fidelity.cases.case import Case, Job
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.config import claim_run, read_left_out, read_probes
from pic_bench.fidelity.measure import Unrealised
from pic_bench.fidelity.passes import Call, Passes, PassRun, Vault
from pic_bench.fidelity.plan import Plan, make_plan
from pic_bench.fidelity.record import Experiment, Probe, append_lines
from pic_bench.fidelity.runner import Outcome, run_fidelity
from pic_bench.fidelity.target import Recorded
from pic_bench.out_folder import write_json

from sglang_pic.cli import main
from sglang_pic.errors import BenchError, ConfigError
from tests.helpers.fidelity_records import Asked, StandIn, parse, probe

Patch = pytest.MonkeyPatch
Run = tuple[Plan, Path]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--edits -1", "edits"),
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
    with pytest.raises(ConfigError, match="another run than this command: seed is 0 there and 1 here"):
        claim_run(folder, msgspec.structs.replace(config, seed=1), resume=True, force=False)
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


class Server:
    """Stands for the server: answers every case at once, but for those it leaves out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *left_out: str) -> None:
        self.left_out = left_out
        self.killed_at = ""
        self.starts = 0
        self.served: list[str] = []
        monkeypatch.setattr(runner, "serve_target", self._start)
        monkeypatch.setattr(runner, "measure", self._measure)

    @contextmanager
    def _start(self, *_: object, **__: object) -> Iterator[None]:
        self.starts += 1
        yield

    def _measure(self, job: Job, *_: object, dtype: str) -> list[Probe]:
        case = job.case
        if case.name == self.killed_at:
            raise BenchError("the server was ended by signal 9")
        self.served.append(case.name)
        if case.name in self.left_out:
            raise Unrealised("not as meant")
        common = {"prompt": case.name, "dtype": dtype, "source": "s", "edit": case.edited.edit}
        common["experiment"] = Experiment.EDITS
        return [probe(arm=arm.name, donors=arm.donors, **common) for arm in job.arms]


@pytest.fixture
def edits_run(tmp_path: Path, model_dir: Callable[[str], Path]) -> Run:
    """A run of 40 prompts that is yet to be measured."""
    config = parse(f"--experiment edits --dtype float32 --edits 40 --model {model_dir('smollm2')}")
    claim_run(tmp_path / "run", config, resume=False, force=False)
    return make_plan(config), tmp_path / "run"


def names_of(plan: Plan) -> list[str]:
    """The names of a run's prompts, in order."""
    return [job.case.name for job in plan.jobs]


def go_on(run: Run) -> Outcome:
    """Measures what is not measured yet."""
    return run_fidelity(*run, start_timeout_s=1, quiet=True)


def test_what_was_left_out_is_neither_served_nor_counted_again(edits_run: Run, monkeypatch: Patch) -> None:
    folder, names = edits_run[1], names_of(edits_run[0])
    server = Server(monkeypatch, names[3], names[5])
    first = go_on(edits_run)
    assert (first.measured, first.resumed, first.left_out) == (38, 0, 2)
    # Broken off after 20 prompts; of the next 20 one more is left out: 3 of 40 are few, 3 of 20 would be too many.
    probes = folder / "probes.jsonl"
    kept = [record for record in read_probes(folder) if names.index(record.prompt) < 20]
    probes.unlink()
    append_lines(probes, kept)
    server = Server(monkeypatch, names[39])
    again = go_on(edits_run)
    assert server.served == names[20:]
    assert (again.measured, again.resumed, again.left_out) == (19, 18, 3)
    assert [left.prompt for left in read_left_out(folder)] == [names[3], names[5], names[39]]
    whole = go_on(edits_run)
    assert (whole.measured, whole.resumed, whole.left_out, server.starts) == (0, 37, 3, 1)


def test_a_run_stops_where_too_much_is_left_out(edits_run: Run, monkeypatch: Patch) -> None:
    server = Server(monkeypatch, *(names_of(edits_run[0])[number] for number in (0, 1, 25)))
    with pytest.raises(BenchError, match="3 of 26 prompts were not served as meant"):
        go_on(edits_run)
    assert len(server.served) == 26


def test_a_run_whose_server_was_killed_goes_on(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, out = Server(monkeypatch), tmp_path / "run"
    asked = f"--experiment edits --edits 3 --dtype float32 --model {model_dir('smollm2')}"
    command = ["fidelity", *asked.split(), "--quiet", "--out", str(out)]
    names = names_of(make_plan(parse(asked)))
    server.killed_at = names[1]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "sglang-pic: error: the server was ended by signal 9" in error
    assert f"what was measured stays in {out}; go on with --resume" in error
    measured, server.killed_at = read_probes(out), ""
    assert main([*command, "--resume"]) == 0
    assert server.served == names
    assert read_probes(out)[: len(measured)] == measured


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


def test_a_run_serves_traces_once(tmp_path: Path, model_dir: Callable[[str], Path], monkeypatch: Patch) -> None:
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
