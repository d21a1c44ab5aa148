"""The experiment with power: its forward pass, its prompts and arms, what it counts, and going on with a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.paired import __main__ as paired
from pic_bench.paired.arms import POLICIES, attended_arms, policy_arms
from pic_bench.paired.cases import ANSWER_TOKENS, LEAST_GONE, TRACE_TOKENS, Cases, Prompt, donor_ends
from pic_bench.paired.forward import Forward
from pic_bench.paired.measure import Measure
from pic_bench.paired.record import Record
from pic_bench.paired.table import losses, table_of
from pic_bench.report.stats import most_lost
from pic_traces.encode import load_encoder
from scipy.stats import binom

from sglang_pic.core import Plan

KINDS = ("order", "drawn", "copies", "gone", "fields", "again", "compacted", "cleared", "sample:opendevin")


@pytest.fixture(scope="module")
def model(model_dir: Callable[[str], Path]) -> Path:
    return model_dir("tiny-gqa")


@pytest.fixture(scope="module")
def forward(model: Path) -> Forward:
    return Forward(model)


@pytest.fixture(scope="module")
def prompts(model_dir: Callable[[str], Path]) -> dict[str, Prompt]:
    """The first prompt of each kind; `drawn` needs the documents of another one."""
    folder = model_dir("smollm2")
    data, longest = [Path("sample:agents")], 2 * TRACE_TOKENS
    cases = Cases(folder, POLICIES, data, 0, 2, longest, ModelText(folder), load_encoder(str(folder)))
    return {kind: next(cases.of(kind, 12)) for kind in KINDS}


def test_a_full_pass_says_what_the_model_knows(model_dir: Callable[[str], Path]) -> None:
    """A wrong norm, rotation or head would leave nothing of it."""
    folder = model_dir("smollm2")
    forward, text = Forward(folder), ModelText(folder)
    for said, known in (("The capital of France is", " Paris"), ("one, two, three, four, five,", " six")):
        ids = torch.tensor(text.ids(said))
        logits = forward.logits(forward.compute(ids, torch.arange(len(ids)), forward.rows(len(ids))))
        assert text.text([int(logits[-1].argmax())]) == known


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_spliced_are_the_prompts_own_tokens(prompts: dict[str, Prompt], kind: str) -> None:
    prompt = prompts[kind]
    assert prompt.plans["most"].num_spliced > 100
    for plan in prompt.plans.values():
        for run in plan.runs:
            donor = run.donor.tokens(run.donor_end)[run.donor_start :].tolist()
            assert donor == prompt.ids[run.target_start : run.target_end]
    donors = list({run.donor: None for plan in prompt.plans.values() for run in plan.runs})
    arms = {arm.name: arm for arm in policy_arms(prompt.plans, donors, 3)}
    num = {name: sum(block.end - block.start for block in arm.blocks) for name, arm in arms.items()}
    assert num["exact"] == num["unrotated"] == num["most"] == prompt.plans["most"].num_spliced
    assert num["tokens-3"] == num["seam-64"], "random choice computes as many"


def test_a_result_is_read_again_behind_steps_that_its_donor_has_not_seen(prompts: dict[str, Prompt]) -> None:
    prompt = prompts["again"]
    (donor,) = {run.donor for run in prompt.plans["most"].runs}
    (run,) = prompt.plans["most"].runs
    assert run.shift >= 96
    assert donor.tokens(prompt.prefix_len).tolist() == prompt.ids[: prompt.prefix_len]
    assert len(prompt.gold) == ANSWER_TOKENS


@pytest.mark.parametrize("kind", ["compacted", "cleared"])
def test_a_compacted_session_is_shorter_than_the_request_before(prompts: dict[str, Prompt], kind: str) -> None:
    prompt = prompts[kind]
    (donor,) = donor_ends(prompt.plans)
    assert len(donor) - len(prompt.ids) > 0
    assert max(run.target_start - run.donor_start for run in prompt.plans["most"].runs) <= -LEAST_GONE
    assert donor.tokens(prompt.prefix_len).tolist() == prompt.ids[: prompt.prefix_len]
    assert prompt.whole is not None
    assert prompt.whole[: len(donor)] == donor.tokens().tolist()


def test_the_answer_is_forced_behind_the_whole_session_too(model: Path, forward: Forward) -> None:
    ids, gold = [[*range(start, start + num)] for start, num in ((5, 40), (60, 8))]
    plan = Plan(prefix_len=0, end=len(ids), runs=())
    measure = Measure(forward, ModelText(model), ())
    for whole, is_equal in ((ids, True), (ids[20:] + ids, False)):
        plans = {"seam-64": plan, "most": plan}
        prompt = Prompt(kind="cleared", name="a", ids=ids, prefix_len=0, plans=plans, gold=gold, whole=whole)
        found = {each.arm: each for each in measure.records(prompt, 0)}["whole"]
        assert (found.kl < 1e-6) == is_equal


@pytest.mark.slow
def test_exact_rows_cost_nothing_and_the_second_pass_computes_a_whole_block(
    model_dir: Callable[[str], Path], prompts: dict[str, Prompt]
) -> None:
    folder = model_dir("smollm2")
    prompt = prompts["drawn"]
    measure = Measure(Forward(folder), ModelText(folder), (18, 23, 28))
    # Whatever a model of 135 M parameters answers is right here.
    found = {each.arm: each for each in measure.records(dataclasses.replace(prompt, judge=lambda *_: True), 0)}
    assert found["exact"].kept
    assert found["exact"].kl < 1e-5
    assert found["unrotated"].kl > found["most"].kl > found["exact"].kl
    blocks = attended_arms(prompt.plans["any-order"], [*{run.donor: None for run in prompt.plans["any-order"].runs}], 0)
    if blocks:
        sizes = {block.end - block.start for block in blocks[0].whole}
        last = len(prompt.ids) - max(block.end for block in blocks[0].blocks)
        num_more = found["any-order"].spliced - found["block-1"].spliced
        assert num_more > 0
        assert num_more + found["block-1"].again - last in sizes


RECORD = Record(
    kind="order", prompt="a", arm="exact", tokens=100, spliced=80, again=0, kept=True, right=True, kl=0.0, worst=0.0,
    sure=4, flips=0, answer=8,
)  # fmt: skip


def test_losses_are_counted_in_pairs() -> None:
    records = [
        replace(RECORD, prompt=prompt, arm=arm, right=right, kl=kl, again=again)
        for prompt, arm, right, kl, again in (
            ("a", "exact", True, 0.0, 0),
            ("a", "s32", False, 0.1, 0),
            ("a", "random-2", True, 0.3, 20),
            ("b", "exact", False, 0.0, 0),
            ("b", "s32", True, 0.3, 0),
            ("b", "random-4", True, 0.1, 0),
            ("c", "s32", False, 9.0, 0),
        )
    ]
    found = losses(records)
    loss, drawn = found["order", "s32"], found["order", "random"]
    assert (loss.prompts, loss.lost, loss.won, loss.kl, loss.computed) == (2, 1, 1, 0.2, 0.2)
    assert (drawn.lost, drawn.won, drawn.computed) == (0, 1, 0.3)
    assert [row[:3] for row in table_of(records).rows] == [["order", arm, "2"] for arm in ("exact", "s32", "random")]


@pytest.mark.parametrize("num", [1, 30, 177])
def test_what_is_lost_at_most_is_wrong_in_one_of_twenty_runs(num: int) -> None:
    """Also where next to nothing is lost, which is what the experiment is there to show."""
    bounds = np.array([most_lost(lost, num) for lost in range(num + 1)])
    assert 0 < bounds.min() <= bounds.max() == 1
    shares = np.linspace(0.001, 0.999, 999)[:, None]
    holds = (binom.pmf(np.arange(num + 1), num, shares) * (bounds >= shares)).sum(axis=1)
    assert holds.min() >= 0.95


def test_a_run_goes_on_where_it_ended(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny model's answers are wrong but for those of a trace, which nobody judges."""
    records = tmp_path / "records.jsonl"
    command = [str(records), "--model", str(model), "--quiet", "--kind", "sample:opendevin", "--num"]
    assert paired.main([str(records), "--model", str(tmp_path)]) == 1, "not a model"
    for num in (1, 2, 2):
        assert paired.main([*command, str(num)]) == 0
        assert len({(each.kind, each.prompt) for each in paired.read(records)}) == num
    assert capsys.readouterr().out.count("exact") == 3
