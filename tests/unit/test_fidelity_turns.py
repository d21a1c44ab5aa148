"""TURNS: how the field changes, that all else stays, passes over a cache that lives on, and what adds up."""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from fidelity_records import probe
from pic_bench.fidelity.arms import FULL, Arm
from pic_bench.fidelity.cases.case import Case
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.cases.turns import conversation
from pic_bench.fidelity.compared import make_panels
from pic_bench.fidelity.drift import by_turn, drift_table, make_drifts, quarters
from pic_bench.fidelity.passes import TURNS_POLICIES, TurnsRun, Vault
from pic_bench.fidelity.record import Change, Donors, Experiment, append_lines
from pic_bench.fidelity.report import write_report
from pic_bench.fidelity.summary import Thresholds
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
    cases = conversation(change, 16, text, 0)
    assert cases == conversation(change, 16, text, 0)
    assert cases != conversation(change, 16, text, 1)
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


class Server:
    """Stands for the server: splices half of a prompt but for controls, and notes what it is asked."""

    def __init__(self, *, cached: int = 0) -> None:
        self.cached, self.asked = cached, []

    def flush(self) -> None:
        self.asked.append("flush")

    def record(
        self, prompt: list[int], gold: list[int], arm: Arm, *, key: str, donors_from: str | None, keys: bool
    ) -> Recorded:
        assert not keys
        self.asked.append((arm.name, key, donors_from))
        hits = 0 if arm == FULL else len(prompt) // 2
        logits = np.zeros((len(gold) + 1, 60), dtype=np.float32)
        return Recorded(logits=logits, spliced=[], keys=None, prefix_hit_tokens=self.cached, chunk_hit_tokens=hits)


@pytest.fixture
def turns_run(tmp_path: Path, text: ModelText) -> Callable[..., TurnsRun]:
    cases = conversation(Change.NEW, 4, text, 0)

    def make(
        server: Server, arms: tuple[Arm, ...] = TURNS_POLICIES, done: AbstractSet[tuple[str, str]] = frozenset()
    ) -> TurnsRun:
        return TurnsRun(
            turns=_short(cases),
            arms=arms,
            target=server,  # type: ignore[arg-type]
            text=text,
            vault=Vault(tmp_path / "vault"),
            dtype="float32",
            done=done,
        )

    return make


def _short(cases: list[Case]) -> list[Case]:
    """The same with ids that the stand-in's 60 logits have."""
    return [Case(experiment=c.experiment, name=c.name, source=c.source, prompt=c.prompt, gold=[1, 2]) for c in cases]


def test_every_policy_has_a_cache_that_lives_through_its_pass(turns_run: Callable[..., TurnsRun]) -> None:
    server = Server()
    probes = [record for step in turns_run(server).steps() for record in step.probes]
    assert [(p.prompt, p.arm) for p in probes] == [
        (f"new-{turn:02}", arm) for arm in ("full", "in_place", "notes", "recompile") for turn in range(4)
    ]
    keys = {asked[1] for asked in server.asked[:4]}
    assert len(keys) == 4, "a full prefill meets nobody's rows"
    passes = [["flush", *[(arm.name, "pass", None)] * 4] for arm in TURNS_POLICIES]
    assert server.asked[4:] == [asked for one in passes for asked in one]
    assert all(ReusePolicy(**arm.overrides).edit == arm.name for arm in TURNS_POLICIES)


def test_a_pass_that_was_broken_off_is_served_again_from_its_first_turn(turns_run: Callable[..., TurnsRun]) -> None:
    first = [record for step in turns_run(Server()).steps() for record in step.probes]
    kept = frozenset((p.prompt, p.arm) for p in first if p.arm != "notes" or p.prompt == "new-00")
    server = Server()
    again = [record for step in turns_run(server, TURNS_POLICIES[1:2], kept).steps() for record in step.probes]
    assert [(p.prompt, p.arm) for p in again] == [(f"new-{turn:02}", "notes") for turn in (1, 2, 3)]
    assert server.asked == ["flush", *[("notes", "pass", None)] * 4], "full prefills are kept"


def test_a_full_prefill_that_was_served_cached_tokens_is_refused(turns_run: Callable[..., TurnsRun]) -> None:
    with pytest.raises(BenchError, match="new-00: a full prefill was served 3 cached tokens"):
        list(turns_run(Server(cached=3)).steps())


def test_the_report_compares_the_last_turns_with_the_first(tmp_path: Path) -> None:
    common = {"experiment": Experiment.TURNS, "donors": Donors.TRACE, "num_blocks": None, "prompt_tokens": 400}
    probes = [
        probe(
            prompt=f"new-{turn:02}", source="new values", arm=arm, kl=kl, forced_kl=0.01, chunk_hit_tokens=hit, **common
        )
        for turn in range(64)
        for arm, kl, hit in (("full", 0.0, 0), ("notes", 0.01, 300), ("in_place", 0.01 * (1 + turn // 16), 360))
    ]
    assert quarters(range(64)) == (7.5, 55.5)
    drifts = make_drifts(make_panels(reversed(probes), Thresholds())[0])
    rows = {row[1]: row for row in drift_table(drifts).rows}
    assert rows.keys() == {"notes", "in_place"}
    assert rows["notes"][2:9] == ["64", "75.0 %", "25.0 %", ".010", ".010", ".010", "1.00"]
    assert rows["in_place"][6:11] == [".010", ".040", "4.00", ".010", "1.00"]
    drawn = by_turn(drifts).drawing.body
    assert drawn.count("notes, turn 64:") == 2
    assert "in_place, turn 64: .040" in drawn
    append_lines(tmp_path / "probes.jsonl", probes)
    assert write_report(tmp_path).drifts == drifts[::-1]
    assert "last / first" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "plot-turns-float32.svg").exists()
