"""Prompts of the paired experiment and their donors: equal ids, edges that do not grow; templates of edits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import chain, combinations
from pathlib import Path

import pytest
from pic_bench.fidelity import arms as fidelity_arms
from pic_bench.fidelity.arms import parse_policy
from pic_bench.fidelity.cases.case import MIN_HEADER, Case, Frame, place_blocks
from pic_bench.fidelity.cases.edits import (
    DISTANCES,
    SHORT_BEFORE_QUESTION,
    Template,
    TemplateSet,
    edit_case,
    templates,
)
from pic_bench.fidelity.cases.qa import QaFrames, qa_case
from pic_bench.fidelity.cases.tasks import MAX_ANSWER_TOKENS, task_cases
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.report.stats import common_len
from pic_generate.questions import GENERATED, generated_questions

from sglang_pic.errors import BenchError, ConfigError


@pytest.fixture(scope="module")
def text(model_dir: Callable[[str], Path]) -> ModelText:
    return ModelText(model_dir("smollm2"))


def check_placed(case: Case, blocks: int) -> None:
    """So many blocks of 80 tokens and more have their ids in the donor too, at other places."""
    donor = case.donor
    found, at = 0, MIN_HEADER
    while at < len(case.prompt) - 80:
        piece = case.prompt[at : at + 80]
        there = [start for start in range(len(donor) - 79) if donor[start : start + 80] == piece]
        assert at not in there
        found, at = found + bool(there), at + (80 if there else 1)
    assert found >= blocks


def test_a_block_that_would_grow_is_refused() -> None:
    header = list(range(100, 160))
    for target, donor, said in (
        ((header, [[1, 2]], [3] * 20), (header[:50], [[9, 7], [8, 2]], [4]), "before a block"),
        ((header, [[1, 2]], [3] * 20), (header[:50], [[9, 7], [8, 6]], [3]), "after a block"),
        ((list(range(100, 232)), [[1, 2]], [3] * 20), (header[:50], [[9, 7], [8, 6]], [4]), "differ in length"),
        (([1], [[2]], [3]), (header, [[9, 7], [8, 6]], [4]), "sink"),
    ):
        frames = (Frame(header=head, markers=markers, closing=end) for head, markers, end in (target, donor))
        with pytest.raises(BenchError, match=said):
            place_blocks(*frames, [[5] * 80], [6] * 80, random.Random(0))


@pytest.mark.parametrize("kind", GENERATED)
def test_generated_questions_are_answered_by_their_documents(text: ModelText, kind: str) -> None:
    questions = list(generated_questions(kind, limit=4, seed=1))
    assert questions == list(generated_questions(kind, limit=4, seed=1))
    frames = QaFrames(text)
    for question in questions:
        case = qa_case(frames, text, question, seed=0)
        check_placed(case, 3)
        prompt = text.text(case.prompt)
        assert prompt.endswith(question.lead)
        assert question.answers[0] in prompt.split("Question:")[0]
        assert sum(question.answers[0] in document for document in question.documents) >= 1


@pytest.fixture(scope="module")
def tasks(text: ModelText, model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Two prompts of each kind: questions, a trace, JSON and edits."""
    trace = tmp_path_factory.mktemp("tasks") / "calls.jsonl"
    schemas = [{"type": "function", "function": {"name": f"tool_{n}", "description": "d" * n}} for n in range(8)]
    system = "\n\n".join(["You book flights for people who call the desk, and you ask before you book."] * 60)
    called = {"id": "1", "type": "function", "function": {"name": "tool_7", "arguments": '{"user": "U"}'}}
    with trace.open("w") as file:
        for n in range(3):
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": "I am U7, and I would like to fly to Oslo."},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [json.loads(json.dumps(called).replace("U", f"U{n // 2}"))],
                },
            ]
            file.write(json.dumps({"session_id": f"s{n}", "tools": schemas, "messages": messages, "turns": [2]}) + "\n")
    questions = [list(generated_questions("facts", limit=2, seed=0))]
    kinds = task_cases(questions, [str(trace)], text, str(model_dir("smollm2")), num=2, length=1, seed=0)
    assert [len(kind) for kind in kinds] == [2, 2, 2, 2], "of two calls that were answered alike one is taken"
    return list(chain.from_iterable(kinds))


def test_tasks_are_judged_and_most_of_them_was_computed_elsewhere(tasks: list[Case], text: ModelText) -> None:
    for case in tasks:
        gold = text.text(case.gold)
        if len(case.gold) < 32:
            assert case.judge(gold, gold), "the right answer is right"
        assert case.answer_tokens <= MAX_ANSWER_TOKENS
        assert not case.judge("I do not know.", gold)
        donor = case.donor
        donated = {tuple(donor[i : i + 64]) for i in range(len(donor))}
        found = [tuple(case.prompt[i : i + 64]) in donated for i in range(len(case.prompt) - 64)]
        assert sum(found) > len(found) // 8
        assert common_len(donor, case.prompt) < 64, "an exact hit would not be spliced"


def test_edits_apply_and_json_has_the_keys_and_values(tasks: list[Case], text: ModelText) -> None:
    edit, obj = (next(case for case in tasks if case.source == source) for source in ("edits", "json"))
    asked = text.text(edit.prompt).rpartition("Task: ")[2]
    line = next(line for line in text.text(edit.prompt).splitlines() if asked.split()[8] in line and "def " in line)
    new = line.replace(f"={asked.split()[10]})", f"={asked.split()[12].split('.')[0]})")
    for search, put, right in (
        (line, new, True),
        (line, line, False),
        ("    return", new, False),
        (line + " ", new, False),
    ):
        assert edit.judge(f"{search}\n=======\n{put}\n>>>>>>> REPLACE", "") is right, (search, put)
    (wanted,) = (arg for arg in obj.judge.args if isinstance(arg, dict))
    for found, right in ((wanted, True), (wanted | {"more": "x"}, False), (dict.fromkeys(wanted, "x"), False)):
        assert obj.judge(json.dumps(found)[1:], "") is right


def test_policies_are_read_and_refused() -> None:
    arm = parse_policy("mine=seam:8,min_run:128,tail:64,reordered:splice")
    assert arm.name == "mine"
    asked = {"seam_tokens": 8, "min_run_tokens": 128, "tail_tokens": 64, "reordered": "splice"}
    assert arm.overrides == asked
    plain = parse_policy("default")
    assert (plain.overrides, plain.rotate) == ({}, True)
    assert len({parse_policy(policy).name for policy in fidelity_arms.DEFAULT_POLICIES}) == len(
        fidelity_arms.DEFAULT_POLICIES
    )
    assert parse_policy("safe=edit:recompile").overrides == {"edit": "recompile"}
    for wrong in ("", "full", "naive", "a b", "x=seam", "x=seam:-1", "x=width:3", "x=unseen:101", "x=edit:none"):
        with pytest.raises(ConfigError, match="--policy"):
            parse_policy(wrong)


EVERY = list(chain(*map(templates, TemplateSet)))


def texts_of(template: Template) -> set[str]:
    """What names the template, and every sentence of it; a line such as `"{name}": "{answer}",` is nobody's."""
    lines = {line for field in template.fields for line in (field.line, *field.rules)}
    sentences = {line for line in lines if sum(map(str.isalpha, line.split())) > 2}
    return {template.name, template.head, template.question, *sentences}


def test_no_text_of_a_template_is_in_two_sets() -> None:
    sets = [set[str]().union(*map(texts_of, templates(of))) for of in TemplateSet]
    assert all(sets)
    assert len(templates(TemplateSet.REPORT)) >= 24
    assert not any(one & other for one, other in combinations(sets, 2))
    assert len({template.name for template in EVERY}) == len(EVERY)


@pytest.mark.parametrize("template", EVERY, ids=lambda template: template.name)
def test_the_two_prompts_differ_in_their_fields_alone(template: Template, text: ModelText) -> None:
    assert len(text.ids(template.head)) >= MIN_HEADER
    assert 1 <= len(template.fields) <= 4
    for field in template.fields:
        assert "{value}" in field.line
        assert len({choice.name for choice in field.choices}) == len(field.choices) >= 2
        assert len({len(choice.forms) for choice in field.choices}) == 1
    for number, distance in enumerate(DISTANCES):
        case = edit_case(template, text, distance, number, 0)
        assert case == edit_case(template, text, distance, number, 0)
        edited, prompt = case.edited, text.text(case.prompt)
        old, new = text.text(edited.old).split("\n"), prompt.split("\n")
        changed = [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
        assert 1 <= len(changed) <= len(template.fields)
        assert common_len(edited.old, case.prompt) >= MIN_HEADER
        assert template.lead in prompt[-len(template.lead) - 20 :]
        assert edited.answers.old != edited.answers.new
        assert prompt.count(template.rules_title) == 1, "or the distance is another's"
        assert len(case.prompt) >= distance + min(SHORT_BEFORE_QUESTION)
