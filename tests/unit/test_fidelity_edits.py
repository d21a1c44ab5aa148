"""The experiment EDITS: its templates, its prompts, its records and their report."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import msgspec
import pytest
from pic_bench.fidelity.cases.case import MIN_HEADER
from pic_bench.fidelity.cases.templates import Field, Template, templates
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.record import TemplateSet

from sglang_pic.errors import ConfigError

EVERY = list(chain(*map(templates, TemplateSet)))


@pytest.fixture(scope="module")
def text(model_dir: Callable[[str], Path]) -> ModelText:
    return ModelText(model_dir("smollm2"))


def texts_of(template: Template) -> set[str]:
    lines = {line for field in template.fields for line in (field.line, *field.rules)}
    return {template.name, template.head, template.question, *lines}


def test_no_text_of_a_template_is_in_both_sets() -> None:
    found, reported = (set[str]().union(*map(texts_of, templates(of))) for of in TemplateSet)
    assert found
    assert reported
    assert not found & reported
    assert len({template.name for template in EVERY}) == len(EVERY)


@pytest.mark.parametrize("template", EVERY, ids=lambda template: template.name)
def test_a_template_s_head_fills_the_sink(template: Template, text: ModelText) -> None:
    assert len(text.ids(template.head)) >= MIN_HEADER


def test_templates_that_cannot_be_used_are_refused() -> None:
    choices = [{"name": "a"}, {"name": "b"}]
    for field, named in (
        ({"line": "none", "choices": choices}, "{value}"),
        ({"line": "{value}", "choices": choices[:1]}, "two or more"),
        ({"line": "{value}", "choices": [*choices, {"name": "c", "forms": ["cc"]}]}, "as many forms"),
    ):
        with pytest.raises((ConfigError, msgspec.ValidationError), match=named):
            msgspec.convert(field, Field)
