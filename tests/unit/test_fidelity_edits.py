"""EDITS: its templates, that two prompts differ in their fields alone, the gate, and what is recovered at what cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import msgspec
import pytest
from fidelity_records import Asked, StandIn, recorded
from pic_bench.fidelity.arms import EDIT_ARMS, FULL, STALE, parse_policy
from pic_bench.fidelity.cases.case import MIN_HEADER, Job
from pic_bench.fidelity.cases.edits import (
    BEFORE_QUESTION,
    DISTANCES,
    UNAFFECTED_TOKENS,
    Template,
    edit_job,
    edit_jobs,
    templates,
)
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.measure import Unrealised, measure
from pic_bench.fidelity.record import Donors, TemplateSet
from pic_bench.fidelity.target import NOBODY, Recorded
from pic_bench.report.stats import common_len

from sglang_pic.errors import BenchError

EVERY = list(chain(*map(templates, TemplateSet)))
ARMS = (FULL, STALE, *EDIT_ARMS)


@pytest.fixture(scope="module")
def text(model_dir: Callable[[str], Path]) -> ModelText:
    return ModelText(model_dir("smollm2"))


def texts_of(template: Template) -> set[str]:
    """What names the template, and every sentence of it; a line such as `"{name}": "{answer}",` is nobody's."""
    lines = {line for field in template.fields for line in (field.line, *field.rules)}
    sentences = {line for line in lines if sum(map(str.isalpha, line.split())) > 2}
    return {template.name, template.head, template.question, *sentences}


def test_no_text_of_a_template_is_in_both_sets() -> None:
    found, reported = (set[str]().union(*map(texts_of, templates(of))) for of in TemplateSet)
    assert found
    assert len(templates(TemplateSet.REPORT)) >= 24
    assert not found & reported
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
        fewest = UNAFFECTED_TOKENS - 64 if edited.answers is None else distance + min(BEFORE_QUESTION)
        assert len(job.case.prompt) >= fewest


def test_filler_stands_between_the_fields_and_the_rules(text: ModelText) -> None:
    template = next(one for one in EVERY if one.name == "tool-router")
    for distance in DISTANCES:
        prompt = text.text(job_of(template, text, distance).case.prompt)
        between = prompt.partition("confidence: ")[2].partition(template.rules_title)[0].partition("\n")[2]
        assert distance <= len(text.ids(between)) <= distance + 32


def test_every_template_meets_every_distance(text: ModelText) -> None:
    of = templates(TemplateSet.REPORT)
    jobs = edit_jobs(TemplateSet.REPORT, 4 * len(of), text, 0, [])
    met = Counter((job.case.edited.edit.template, job.case.edited.edit.distance) for job in jobs)
    assert len(met) == 4 * len(of)
    assert len({job.case.name for job in jobs}) == len(jobs)
    assert len({job.case.edited.edit.template for job in jobs[: len(of)]}) == len(of)
    assert {job.case.edited.edit.num_fields for job in jobs} == {1, 2, 3, 4}
    named = parse_policy("notes=edit:notes,edit_tail:128")
    (job, *_) = edit_jobs(TemplateSet.REPORT, 1, text, 0, [named, parse_policy("mine=seam:8")])
    assert [arm.name for arm in job.arms] == ["full", "stale", "in_place", "notes", "recompile", "mine"]
    assert job.arms[3].overrides == {"edit": "notes", "edit_tail_tokens": 128}


def test_answers_that_begin_alike_are_refused(text: ModelText) -> None:
    good = msgspec.to_builtins(templates(TemplateSet.REPORT)[0])
    answers = [{"name": "a", "answer": "Ann"}, {"name": "b", "answer": "Ann Lee"}]
    alike = msgspec.convert({**good, "fields": [{"line": "{value}", "choices": answers}]}, Template)
    with pytest.raises(BenchError, match="begin alike"):
        job_of(alike, text)


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


def test_a_prompt_whose_field_the_model_does_not_use_is_served_no_further(job: Job, text: ModelText) -> None:
    server = Server(job, {"full": 1.4, "stale": 1.0})
    probes = measure(job, server, text, dtype="float32", page_size=1)
    assert [probe.arm for probe in probes] == ["full", "stale"]
    assert job.is_done(probes), "it is not served again"
    assert not job.is_done(probes[:1])
    with pytest.raises(Unrealised, match="full-none: 7 prefix hit and 0 chunk hit tokens, 0 and 0 were meant"):
        measure(job, Server(job, server.logits, prefix=7), text, dtype="float32", page_size=1)
