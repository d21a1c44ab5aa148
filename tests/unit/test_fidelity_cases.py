"""Prompts and donors of the experiments: equal ids, edges that do not grow, seams as asked; policies."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from fidelity_records import recorded
from pic_bench.fidelity.arms import CONTROLS, DEFAULT_POLICIES, EXACT, FULL, Arm, parse_policy, place_sessions
from pic_bench.fidelity.cases.case import MIN_HEADER, Case, Frame, Span, place_blocks
from pic_bench.fidelity.cases.passages import grid_jobs
from pic_bench.fidelity.cases.qa import qa_jobs
from pic_bench.fidelity.cases.text import ModelText, TextPool, trace_texts
from pic_bench.fidelity.config import QUICK_SIZES
from pic_bench.fidelity.measure import Unrealised, check_realised
from pic_bench.fidelity.record import Donors, Experiment
from pic_traces.questions import GENERATED, generated_questions, read_questions

from sglang_pic.errors import BenchError, ConfigError


def find_block(ids: list[int], block: list[int]) -> int:
    """Where a block begins in a donor that has it."""
    return next(start for start in range(len(ids)) if ids[start : start + len(block)] == block)


@pytest.fixture(scope="module")
def text(model_dir: Callable[[str], Path]) -> ModelText:
    return ModelText(model_dir("smollm2"))


@pytest.fixture(scope="module")
def pool(text: ModelText) -> TextPool:
    return TextPool("sample", trace_texts("sample:opendevin"), text)


def check_case(case: Case) -> None:
    """Every block has its ids in a donor, at another place, and neither neighbour is equal."""
    for kind, donors in case.donors.items():
        for number, block in enumerate(case.blocks):
            ids = case.prompt[block.start : block.end]
            donor = donors[number] if kind is Donors.ISOLATED else donors[0]
            start = find_block(donor, ids)
            assert MIN_HEADER <= start != block.start
            assert donor[start - 1] != case.prompt[block.start - 1]
            after = start + len(ids)
            assert after < len(donor)
            assert donor[after] != case.prompt[block.end]


def test_a_grid_prompt_and_its_donors_and_arms(text: ModelText, pool: TextPool) -> None:
    sizes = msgspec.structs.replace(QUICK_SIZES, prompts=2, blocks=(1, 2, 16))
    jobs = list(grid_jobs(sizes, pool, text, 0))
    assert jobs == list(grid_jobs(sizes, pool, text, 0))
    assert len({tuple(job.case.prompt) for job in jobs}) == len(jobs) == 6
    for job, num_blocks in zip(jobs, sizes.blocks * 2, strict=True):
        case = job.case
        check_case(case)
        assert [end - start for start, end in case.blocks] == [80] * num_blocks
        assert (len(case.donors[Donors.ISOLATED]), len(case.donors[Donors.CONTEXT])) == (num_blocks, 1)
        places = [find_block(case.donors[Donors.CONTEXT][0], case.prompt[start:end]) for start, end in case.blocks]
        assert num_blocks == 1 or all(sorted(places).index(at) != i for i, at in enumerate(places)), "another order"
        assert len(case.gold) == 32
        assert len(case.prompt) - case.blocks[-1].end == 24, "the tail is computed"
        # Block, tail and gold of the last passage are one piece of the text.
        passage = text.text(case.prompt[case.blocks[-1].start :] + case.gold)
        assert any(passage in document for document in trace_texts("sample:opendevin"))
    arms = jobs[0].arms
    assert arms[:3] == CONTROLS
    assert len({arm.label for arm in arms}) == len(arms) == 3 + 2 * (3 + 1)
    assert all(not arm.rotate and arm.seam_tokens == 1 for arm in arms if arm.name == "naive")
    assert {arm.seam_tokens for arm in arms[3:] if arm.rotate} == {*sizes.seams}


def test_blocks_of_a_prompt_share_no_passage(text: ModelText) -> None:
    pool = TextPool("repeats", ["one two three four five six seven eight nine ten. " * 40], text)
    with pytest.raises(BenchError, match="too little text"):
        pool.cut(random.Random(0), [80, 80])


def test_a_block_that_would_grow_is_refused() -> None:
    header = list(range(100, 160))
    target = Frame(header=header, markers=[[1, 2]], closing=[3] * 20)
    donor = Frame(header=header[:50], markers=[[9, 7], [8, 2]], closing=[4])
    with pytest.raises(BenchError, match="before a block"):
        place_blocks(target, donor, [[5] * 80], [6] * 80, random.Random(0))
    donor = Frame(header=header[:50], markers=[[9, 7], [8, 6]], closing=[3])
    with pytest.raises(BenchError, match="after a block"):
        place_blocks(target, donor, [[5] * 80], [6] * 80, random.Random(0))
    donor = Frame(header=header, markers=[[9, 7], [8, 6]], closing=[4])
    with pytest.raises(BenchError, match="differ in length"):
        place_blocks(target, donor, [[5] * 80], [6] * 80, random.Random(0))
    with pytest.raises(BenchError, match="sink"):
        place_blocks(Frame(header=[1], markers=[[2]], closing=[3]), donor, [[5] * 80], [6] * 80, random.Random(0))


@pytest.mark.parametrize("kind", GENERATED)
def test_generated_questions_are_answered_by_their_documents(text: ModelText, kind: str) -> None:
    questions = list(generated_questions(kind, limit=6, seed=1))
    assert questions == list(generated_questions(kind, limit=6, seed=1))
    for question, job in zip(questions, qa_jobs(questions, text, 0), strict=True):
        check_case(job.case)
        assert len(job.case.blocks) >= 3
        assert all(end - start >= 80 for start, end in job.case.blocks)
        prompt = text.text(job.case.prompt)
        assert prompt.endswith(question.lead)
        assert question.answers[0] in prompt.split("Question:")[0]
        assert sum(question.answers[0] in document for document in question.documents) >= 1


def test_a_question_set_is_read_one_question_of_each_item_first(tmp_path: Path) -> None:
    qa = [{"question": "1", "answers": ["a"]}, {"question": "2", "answers": []}, {"question": "3", "answers": ["c"]}]
    items = [{"id": name, "source": "s", "documents": [{"title": "", "text": "d"}], "qa": qa} for name in "xyz"]
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    found = read_questions(path, limit=5, seed=0)
    assert [q.question for q in found] == ["1", "1", "1", "3", "3"]
    assert {q.name for q in found[:3]} == {"x-0", "y-0", "z-0"}


def test_what_was_not_spliced_as_meant_is_found() -> None:
    blocks = (Span(50, 130), Span(140, 220))
    case = Case(experiment=Experiment.GRID, name="c", source="s", prompt=[1] * 300, gold=[], blocks=blocks)
    arm = Arm(name="seam-8", donors=Donors.ISOLATED, overrides={"seam_tokens": 8})
    check_realised(case, arm, recorded([(58, 130), (148, 220)]), 1)
    check_realised(case, arm, recorded([(64, 128), (160, 208)]), 16)
    for spliced in ([(58, 130)], [(57, 130), (148, 220)], [(58, 130), (148, 221)], [(64, 128), (160, 208)], []):
        with pytest.raises(Unrealised, match="were"):
            check_realised(case, arm, recorded(spliced), 1)
    check_realised(case, EXACT, recorded([], prefix=299), 1)
    check_realised(case, FULL, recorded([]), 1)
    for control, wrong in (
        (EXACT, recorded([], prefix=290)),
        (FULL, recorded([(58, 130)])),
        (FULL, recorded([], prefix=50)),
    ):
        with pytest.raises(Unrealised, match="were meant"):
            check_realised(case, control, wrong, 1)


def test_policies_are_read_and_refused() -> None:
    arm = parse_policy("mine=seam:8,min_run:128,tail:64,unseen:20,max_misfits:4")
    assert (arm.name, arm.seam_tokens) == ("mine", 8)
    asked = {"seam_tokens": 8, "min_run_tokens": 128, "tail_tokens": 64, "unseen_percent": 20, "max_misfits": 4}
    assert arm.overrides == asked
    plain = parse_policy("default")
    assert (plain.seam_tokens, plain.overrides, plain.rotate) == (None, {}, True)
    assert len({parse_policy(policy).name for policy in DEFAULT_POLICIES}) == len(DEFAULT_POLICIES)
    assert parse_policy("safe=edit:recompile").overrides == {"edit": "recompile"}
    for wrong in ("", "full", "stale", "a b", "x=seam", "x=seam:-1", "x=width:3", "x=unseen:101", "x=edit:none"):
        with pytest.raises(ConfigError, match="--policy"):
            parse_policy(wrong)


def test_orders_of_sessions() -> None:
    sessions = [4, 1, 1, 9, 0, 5]
    in_order = {
        order: sorted(set(sessions), key=place_sessions(sessions, order).__getitem__)
        for order in ("recorded", "reversed", "shuffled-1", "shuffled-2")
    }
    assert in_order["recorded"] == [0, 1, 4, 5, 9] == in_order["reversed"][::-1]
    assert len({tuple(order) for order in in_order.values()}) == len(in_order)
    assert in_order["shuffled-1"] == [1, 5, 9, 4, 0]  # the same in every run, whatever its seed
    for wrong in ("", "shuffled", "shuffled-0", "shuffled-10000", "Recorded", "../x"):
        with pytest.raises(ConfigError, match="--order"):
            place_sessions(sessions, wrong)
