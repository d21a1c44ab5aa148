"""Experiments' prompts and donors: equal ids, edges that do not grow, seams as asked; EDITS' templates and recovery."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path

import msgspec
import pytest
from pic_bench.fidelity import arms as fidelity_arms
from pic_bench.fidelity.arms import EXACT, FULL, STALE, Arm, parse_policy
from pic_bench.fidelity.cases import edits
from pic_bench.fidelity.cases.case import MIN_HEADER, Case, Frame, Job, Span, place_blocks
from pic_bench.fidelity.cases.edits import DISTANCES, Template, edit_job, templates
from pic_bench.fidelity.cases.qa import qa_jobs
from pic_bench.fidelity.cases.tasks import MAX_ANSWER_TOKENS, task_jobs
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.config import Sizes
from pic_bench.fidelity.measure import Unrealised, check_realised, measure
from pic_bench.fidelity.record import Donors, Experiment, TemplateSet
from pic_bench.fidelity.target import NOBODY, Recorded
from pic_bench.report.stats import common_len
from pic_generate.questions import GENERATED, generated_questions

from sglang_pic.errors import BenchError, ConfigError
from tests.helpers.fidelity_records import Asked, StandIn, recorded


def find_block(ids: list[int], block: list[int]) -> int:
    """Where a block begins in a donor that has it."""
    return next(start for start in range(len(ids)) if ids[start : start + len(block)] == block)


@pytest.fixture(scope="module")
def text(model_dir: Callable[[str], Path]) -> ModelText:
    return ModelText(model_dir("smollm2"))


def check_case(case: Case) -> None:
    """Every block has its ids in a donor, at another place, and neither neighbour is equal."""
    for (donor,) in case.donors.values():
        for block in case.blocks:
            ids = case.prompt[block.start : block.end]
            start = find_block(donor, ids)
            assert MIN_HEADER <= start != block.start
            assert donor[start - 1] != case.prompt[block.start - 1]
            after = start + len(ids)
            assert after < len(donor)
            assert donor[after] != case.prompt[block.end]


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


@pytest.fixture(scope="module")
def tasks(text: ModelText, model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
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
    kinds = task_jobs(questions, [str(trace)], text, str(model_dir("smollm2")), Sizes(tasks=2), (), 0)
    assert [len(kind) for kind in kinds] == [2, 2, 2, 2], "of two calls that were answered alike one is taken"
    return list(chain.from_iterable(kinds))


def test_tasks_are_judged_and_most_of_them_was_computed_elsewhere(tasks: list[Job], text: ModelText) -> None:
    for job in tasks:
        case = job.case
        gold = text.text(case.gold)
        if len(case.gold) < 32:
            assert case.judge(gold, gold), "the right answer is right"
        assert job.answer_tokens <= MAX_ANSWER_TOKENS
        assert not case.judge("I do not know.", gold)
        (donor,) = case.donors[Donors.CONTEXT]
        donated = {tuple(donor[i : i + 64]) for i in range(len(donor))}
        found = [tuple(case.prompt[i : i + 64]) in donated for i in range(len(case.prompt) - 64)]
        assert sum(found) > len(found) // 8
        assert common_len(donor, case.prompt) < 64, "an exact hit would not be spliced"
        assert [arm.name for arm in job.arms] == ["full", "exact", "careful", "balanced", "no-tail", "most", "naive"]


def test_edits_apply_and_json_has_the_keys_and_values(tasks: list[Job], text: ModelText) -> None:
    edit, obj = (next(job.case for job in tasks if job.case.source == source) for source in ("edits", "json"))
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


def test_where_the_full_prefill_is_wrong_nothing_else_is_served(tasks: list[Job], text: ModelText) -> None:
    class Greedy(StandIn):
        def __init__(self, answers: list[str], sure: float = 0.0) -> None:
            super().__init__(vocab=49_152)
            self.answers, self.sure, self.computed, self.batches = answers, sure, 0, []

        def answer(self, asked: Asked) -> Recorded:
            prefix = len(asked.prompt) - 1 if asked.arm == EXACT else 0
            hits = 0 if asked.arm.is_control else 100
            found = recorded(prefix=prefix, hits=hits, positions=len(asked.gold) + 1, vocab=self.vocab)
            found.logits[range(len(asked.gold)), asked.gold] = self.sure
            return found

        def compute(self, *_: object, **__: object) -> None:
            self.computed += 1

        def greedy(self, _prompt: object, arms: list[Arm], *_: object) -> list[list[int]]:
            self.batches.append(len(arms))
            return [text.ids(self.answers[0 if arm.is_control or arm.rotate else 1]) for arm in arms]

    job = next(job for job in tasks if job.case.source == "calls")
    right = 'tool_1 {"a": 1}'
    server = Greedy([right, 'tool_2 {"a": 1}'])
    probes = measure(job, server, text, dtype="float32", page_size=1)
    assert {probe.arm: probe.right for probe in probes} == {
        **dict.fromkeys([a.name for a in job.arms], True),
        "naive": False,
    }
    assert (server.computed, server.batches) == (1, [1, len(job.arms)])
    assert job.is_done(probes)
    server = Greedy(["I do not know.", right])
    probes = measure(job, server, text, dtype="float32", page_size=1)
    assert [(probe.arm, probe.right) for probe in probes] == [("full", False)]
    assert (server.computed, server.batches) == (0, [1])
    assert job.is_done(probes), "it is not served again"
    server = Greedy([right, right], sure=1.0)
    measure(job, server, text, dtype="float32", page_size=1)
    assert server.batches == [len(job.arms)], "an answer that is known to be right is generated once"


def test_what_was_not_spliced_as_meant_is_found() -> None:
    blocks = (Span(50, 130), Span(140, 220))
    case = Case(experiment=Experiment.QA, name="c", source="s", prompt=[1] * 300, gold=[], blocks=blocks)
    arm = Arm(name="seam-8", donors=Donors.CONTEXT, overrides={"seam_tokens": 8})
    check_realised(case, arm, recorded([(58, 130), (148, 220)]), 1)
    check_realised(case, arm, recorded([(64, 128), (160, 208)]), 16)
    for spliced in ([(58, 130)], [(57, 130), (148, 220)], [(58, 130), (148, 221)], [(64, 128), (160, 208)], []):
        with pytest.raises(Unrealised, match="were"):
            check_realised(case, arm, recorded(spliced), 1)
    check_realised(case, EXACT, recorded([], prefix=299), 1)
    check_realised(case, FULL, recorded([]), 1)
    whole = recorded([], prefix=290), recorded([(58, 130)]), recorded([], prefix=50)
    for control, wrong in zip((EXACT, FULL, FULL), whole, strict=True):
        with pytest.raises(Unrealised, match="were meant"):
            check_realised(case, control, wrong, 1)


def test_policies_are_read_and_refused() -> None:
    arm = parse_policy("mine=seam:8,min_run:128,tail:64,reordered:splice")
    assert (arm.name, arm.seam_tokens) == ("mine", 8)
    asked = {"seam_tokens": 8, "min_run_tokens": 128, "tail_tokens": 64, "reordered": "splice"}
    assert arm.overrides == asked
    plain = parse_policy("default")
    assert (plain.seam_tokens, plain.overrides, plain.rotate) == (None, {}, True)
    assert len({parse_policy(policy).name for policy in fidelity_arms.DEFAULT_POLICIES}) == len(
        fidelity_arms.DEFAULT_POLICIES
    )
    assert parse_policy("safe=edit:recompile").overrides == {"edit": "recompile"}
    for wrong in ("", "full", "stale", "a b", "x=seam", "x=seam:-1", "x=width:3", "x=unseen:101", "x=edit:none"):
        with pytest.raises(ConfigError, match="--policy"):
            parse_policy(wrong)


EVERY = list(chain(*map(templates, TemplateSet)))
ARMS = (FULL, STALE, *fidelity_arms.EDIT_ARMS)


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


def job_of(template: Template, text: ModelText, distance: int = 32, number: int = 0) -> Job:
    return edit_job(template, text, ARMS, distance, number, 0, "report")


@pytest.mark.parametrize("template", EVERY, ids=lambda template: template.name)
def test_the_two_prompts_differ_in_their_fields_alone(template: Template, text: ModelText) -> None:
    assert len(text.ids(template.head)) >= MIN_HEADER
    assert 1 <= len(template.fields) <= 4
    for field in template.fields:
        assert "{value}" in field.line
        assert len({choice.name for choice in field.choices}) == len(field.choices) >= 2
        assert len({len(choice.forms) for choice in field.choices}) == 1
    for number, distance in enumerate(DISTANCES):
        job = job_of(template, text, distance, number)
        assert job == job_of(template, text, distance, number)
        edited, prompt = job.case.edited, text.text(job.case.prompt)
        old, new = text.text(edited.old).split("\n"), prompt.split("\n")
        changed = [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
        assert len(changed) == edited.edit.num_fields
        assert common_len(edited.old, job.case.prompt) >= MIN_HEADER
        assert edited.edit.old_tokens + edited.edit.new_tokens > 0
        assert template.lead in prompt[-len(template.lead) - 20 :]
        assert (edited.answers is None) is not template.family.is_gated
        assert edited.answers is None or edited.answers.old != edited.answers.new
        assert prompt.count(template.rules_title) == 1, "or the distance is another's"
        fewest = edits.UNAFFECTED_TOKENS - 64 if edited.answers is None else distance + min(edits.SHORT_BEFORE_QUESTION)
        assert len(job.case.prompt) >= fewest


class Server(StandIn):
    """The new answer's logit is what is given for the arm, all others are 0."""

    def __init__(self, job: Job, logits: dict[str, float], *, prefix: int = 0) -> None:
        super().__init__(prefix=prefix, vocab=49_152)
        self.new, self.logits = job.case.edited.answers.new, logits

    def answer(self, asked: Asked) -> Recorded:
        assert not asked.gold
        spliced = [] if asked.arm in (FULL, STALE) else [(40, 140)]
        found = recorded(spliced, prefix=self.prefix, vocab=self.vocab)
        found.logits[0, self.new] = self.logits[asked.arm.name]
        return found


@pytest.fixture
def job(text: ModelText) -> Job:
    return job_of(templates(TemplateSet.REPORT)[0], text)


def test_a_prompt_is_served_under_every_arm_behind_the_old_one(job: Job, text: ModelText) -> None:
    seam = msgspec.structs.replace(parse_policy("seam-8=seam:8"), donors=Donors.EDITED)
    job = replace(job, arms=(*ARMS, seam))
    server = Server(job, {"full": 3.0, "stale": 1.0, "in_place": 1.5, "notes": 2.5, "recompile": 3.0, "seam-8": 1.5})
    probes = {probe.arm: probe for probe in measure(job, server, text, dtype="float32", page_size=1)}
    assert list(probes) == [arm.name for arm in job.arms]
    assert [asked.arm.name for asked in server.asked if asked.prompt == job.case.edited.old] == ["stale"]
    assert server.asked[1].donors_from == NOBODY
    assert {asked.donors_from for asked in server.asked[2:]} == {server.asked[1].key}
    assert len({asked.key for asked in server.asked}) == len(job.arms), "no arm meets another's rows"
    assert {name: probe.log_odds for name, probe in probes.items()} == server.logits
    assert (probes["full"].computed_tokens, probes["stale"].computed_tokens) == (len(job.case.prompt), 0)
    assert probes["full"].kl == 0 < probes["notes"].kl < probes["stale"].kl
    assert job.is_done(list(probes.values()))
    assert not job.is_done([probes[name] for name in ("full", "stale", "in_place")])
