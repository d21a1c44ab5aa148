"""TRACE and TURNS: passes over a cache that lives on; how a field changes, that all else stays, and what adds up."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from fidelity_records import Asked, StandIn, parse, probe
from pic_bench.fidelity import runner
from pic_bench.fidelity.arms import EXACT, Arm, parse_policy
from pic_bench.fidelity.cases.calls import Call, conversation
from pic_bench.fidelity.cases.case import Case
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.compared import make_cells, make_panels
from pic_bench.fidelity.folder import read_probes
from pic_bench.fidelity.passes import Passes, PassRun, Vault
from pic_bench.fidelity.pictures import pictures_of
from pic_bench.fidelity.plan import TURNS_POLICIES, make_plan
from pic_bench.fidelity.record import Change, Donors, Experiment, Probe, append_lines
from pic_bench.fidelity.report import write_report
from pic_bench.fidelity.runner import run_fidelity
from pic_bench.fidelity.summary import Thresholds
from pic_bench.fidelity.tables import cell_table, quarter
from pic_bench.fidelity.target import Recorded

from sglang_pic.core import ReusePolicy
from sglang_pic.errors import BenchError, ConfigError

FIELD = re.compile(r"The depot in use is (.*)\.\n|It is (\d\d:\d\d)\.\n")


@pytest.fixture(scope="module")
def text(model_dir: Callable[[str], Path]) -> ModelText:
    return ModelText(model_dir("smollm2"))


def field(text: ModelText, case: Case) -> str:
    found = FIELD.search(text.text(case.prompt))
    assert found is not None
    return found[1] or found[2]


@pytest.mark.parametrize("change", Change)
def test_only_the_field_changes_and_the_rest_grows(text: ModelText, change: Change) -> None:
    calls = conversation(change, 16, text, 0)
    assert calls == conversation(change, 16, text, 0)
    assert calls != conversation(change, 16, text, 1)
    cases = [call.case for call in calls]
    assert len({case.name for case in cases}) == 16
    prompts = [FIELD.sub("", text.text(case.prompt)) for case in cases]
    for earlier, later, case in zip(prompts, prompts[1:], cases, strict=False):
        assert later.startswith(earlier + text.text(case.gold))
    grown = np.diff([len(case.prompt) for case in cases])
    assert 50 <= grown.min() <= grown.mean() <= 120
    values = [field(text, case) for case in cases]
    assert all(a != b for a, b in pairwise(values)), "it changes at every turn"
    assert len(set(values)) == {Change.NEW: 16, Change.TOGGLE: 2, Change.RETURN: 9, Change.CLOCK: 16}[change]
    mentions = [prompt.count(value) for prompt, value in zip(prompts, values, strict=True)]
    assert all(number == 0 for number in mentions) if change is Change.CLOCK else min(mentions) >= 1


def test_a_conversation_that_does_not_fit_is_refused(model_dir: Callable[[str], Path]) -> None:
    short = ModelText(model_dir("smollm2"))
    short.context_len = 800
    with pytest.raises(ConfigError, match=r"turns=12: the last one needs .* the model's context has 800"):
        conversation(Change.NEW, 12, short, 0)


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
def turns(text: ModelText) -> Passes:
    """Four turns, with answers of ids that the stand-in's logits have."""
    calls = [replace(call, case=replace(call.case, gold=[1, 2])) for call in conversation(Change.NEW, 4, text, 0)]
    return Passes(source="s", calls=[replace(call, answer=[1, 2]) for call in calls], arms=TURNS_POLICIES)


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


def test_every_policy_has_a_cache_that_lives_through_its_pass(serve: Serve, turns: Passes) -> None:
    server = Cache()
    probes = serve(turns, server)
    assert arms_of(probes) == [
        (f"new-{turn:02}", arm) for arm in ("full", "in_place", "notes", "recompile") for turn in range(4)
    ]
    assert turns.is_done(frozenset(arms_of(probes)))
    assert not turns.is_done(frozenset(arms_of(probes[1:])))
    controls, *passes = server.passes
    assert len({key for key, *_ in controls}) == 4, "a full prefill meets nobody's rows"
    found = [[(key, arm) for key, arm, _ in one] for one in passes]
    assert found == [[("pass", arm.name)] * 4 for arm in TURNS_POLICIES]
    assert {asked.donors_from for asked in server.asked[4:]} == {None}
    assert all(ReusePolicy(**arm.overrides).edit == arm.name for arm in TURNS_POLICIES)


def test_a_pass_that_was_broken_off_is_served_again_from_its_first_turn(serve: Serve, turns: Passes) -> None:
    kept = frozenset(arms_of(p for p in serve(turns, Cache()) if p.arm != "notes" or p.prompt == "new-00"))
    server = Cache()
    assert arms_of(serve(turns, server, kept)) == [(f"new-{turn:02}", "notes") for turn in (1, 2, 3)]
    assert [len(one) for one in server.passes] == [0, 4], "full prefills are kept"


def test_a_full_prefill_that_was_served_cached_tokens_is_refused(serve: Serve, turns: Passes) -> None:
    with pytest.raises(BenchError, match="new-00: a full prefill was served 3 cached tokens"):
        serve(turns, Cache(prefix=3))


def test_every_pass_over_a_trace_fills_the_cache_alike(serve: Serve, trace: Passes) -> None:
    server = Cache()
    probes = serve(trace, server)
    assert len({*arms_of(probes)}) == len(probes) == 2 * 3 * 5
    passes = [[tokens for key, _, tokens in one if key == "pass"] for one in server.passes[1:]]
    found, exact, more = passes[::2]
    assert found == exact == more
    assert passes[1::2] == [passes[1]] * 3 != passes[::2]


def test_a_trace_goes_on_without_what_an_earlier_run_kept(tmp_path: Path, serve: Serve, trace: Passes) -> None:
    probes = serve(trace, Cache())
    shutil.rmtree(tmp_path / "vault")
    again = serve(trace, Cache(), frozenset(arms_of(p for p in probes if p.arm != "more")))
    assert arms_of(again) == arms_of(p for p in probes if p.arm == "more")


def test_a_run_serves_traces_and_conversations_once(
    tmp_path: Path, model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "--experiment trace --experiment turns --quick --dtype float32 --turns 2 --calls 3 --change new"
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
    arms = {Experiment.TRACE: {"full", "retest", "exact", "default", "naive"}, Experiment.TURNS: {"full", "default"}}
    for experiment, names in arms.items():
        assert {probe.arm for probe in probes if probe.experiment is experiment} == names
    assert len(probes) == len({(probe.experiment, probe.prompt, probe.arm) for probe in probes})
    # A call of a trace with its controls, in the exact pass and in the naive one; a turn with its full prefill, and in
    # the policy's pass.
    traced = {probe.prompt for probe in probes if probe.experiment is Experiment.TRACE}
    assert first.measured == 3 * len(traced) + 2 * 2
    assert not (tmp_path / "vault/float32").exists()
    again = run_fidelity(plan, tmp_path, start_timeout_s=1, quiet=True)
    assert (again.measured, len(starts)) == (0, 1)


def test_the_report_compares_the_last_turns_with_the_first(tmp_path: Path) -> None:
    common = {"experiment": Experiment.TURNS, "donors": Donors.TRACE, "num_blocks": None, "prompt_tokens": 400}
    common |= {"source": "new values", "forced_kl": 0.01}
    probes = [
        probe(prompt=f"new-{turn:02}", arm=arm, kl=kl, chunk_hit_tokens=hit, **common)
        for turn in range(64)
        for arm, kl, hit in (("full", 0.0, 0), ("notes", 0.01, 300), ("in_place", 0.01 * (1 + turn // 16), 360))
    ]
    assert (quarter(range(64), 0), quarter(range(64), -1)) == (7.5, 55.5)
    cells = make_cells(make_panels(reversed(probes), Thresholds())[0], Thresholds())
    assert [cell.kl_by_turn[::16] for cell in cells] == [[0.0] * 4, [0.01, 0.02, 0.03, 0.04], [0.01] * 4]
    table = cell_table(cells)
    rows = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    said = {name: [row[title] for title in ("n", "spliced", "computed", "KL mean")] for name, row in rows.items()}
    assert (said["notes"], said["in_place"][1]) == (["64", "75.0 %", "25.0 %", ".010"], "90.0 %")
    assert [rows["in_place"][f"{end} turns"] for end in ("first", "last")] == [".010", ".040"]
    (picture,) = pictures_of(cells, "float32")
    assert "notes, 57 to 64: .010" in picture.drawing.body
    assert "in_place, 57 to 64: .040" in picture.drawing.body
    append_lines(tmp_path / "probes.jsonl", probes)
    written = write_report(tmp_path).cells
    assert [cell.kl_by_turn for cell in written] == [cell.kl_by_turn for cell in cells]
    assert "last turns" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "plot-turns-float32-new-values.svg").exists()
