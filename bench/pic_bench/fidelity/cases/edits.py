"""Prompts that are served behind the same prompt with other values in some of its fields, for `pic_bench.paired`.

A template is a prompt with fields, and lines that draw nothing from any field. None was used to find a rule, and none
is in both edits/report.toml and edits/words.toml. A prompt is

    head | fields | after | filler | rules | filler | question | lead        the answer follows

and the old and the new prompt differ in the values of the first fields alone. Values, their forms and the number of
changed fields are drawn.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cache
from pathlib import Path

import msgspec

from pic_bench.fidelity.cases.case import Case, Edited, Family, Ids, Tokens
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.report.stats import common_len
from sglang_pic.errors import BenchError

DISTANCES = (0, 32, 128, 512)
BEFORE_QUESTION = (64, 256, 448)
"""Tokens of filler between the rules and the question. Of a longer edit the last 256 tokens are computed anyhow: rules
within them would say nothing."""
SHORT_BEFORE_QUESTION = (64, 96)
"""Of the set WORDS, which large models are asked."""
_FOLDER = Path(__file__).with_name("edits")
_ALTERNATIVES = re.compile(r"\[([^]|]+(?:\|[^]|]+)+)\]")


class TemplateSet(Enum):
    """Sets of templates; none is in both, and none was used to find the rule of changed fields."""

    REPORT = "report"
    WORDS = "words"  # for models that can draw conclusions: said in other words, in short prompts


class Layout(Enum):
    """Which messages the parts of a prompt are in."""

    SYSTEM = "system"  # all in the system message, the question in the user's
    USER = "user"  # the head in the system message, all the rest in the user's
    TURNS = "turns"  # head and fields in the system message, rules in a message that was answered, then the question
    PLAIN = "plain"  # plain text, no chat template


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One value of a field; edits/report.toml says what the keys of this and of what has it mean."""

    name: str
    forms: tuple[str, ...] = ()
    via: str = ""
    answer: str = ""

    @property
    def values(self) -> tuple[str, ...]:
        """Every form, the shortest first."""
        return self.name, *self.forms


class Field(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field of a prompt."""

    line: str
    choices: tuple[Choice, ...]
    rules: tuple[str, ...] = ()


class Template(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt whose fields may change; texts are used as they are, lines are joined by line breaks."""

    name: str
    family: Family
    layout: Layout
    head: str
    fields: tuple[Field, ...]
    after: str = ""
    filler: str
    rules_title: str = ""
    reply: str = "Understood."
    question: str
    lead: str = ""


@cache
def fillers() -> dict[str, tuple[str, ...]]:
    """Lines that draw on no field, by the name of their style."""
    return msgspec.toml.decode((_FOLDER / "fillers.toml").read_bytes(), type=dict[str, tuple[str, ...]])


@cache
def templates(of: TemplateSet) -> tuple[Template, ...]:
    """The templates of a set, in the file's order."""
    path = _FOLDER / f"{of.value}.toml"
    return msgspec.toml.decode(path.read_bytes(), type=dict[str, tuple[Template, ...]])["templates"]


def edit_case(template: Template, text: ModelText, distance: int, number: int, seed: int) -> Case:
    """One prompt of a template; the same arguments give the same prompt."""
    rng = random.Random(f"edits-{seed}-{template.name}-{number}")
    counts = range(1, 1 + len(template.fields))
    (num_fields,) = rng.choices(counts, counts)
    old, new = draw_values(template, num_fields, rng)
    write = Writer(template, text, distance, rng)
    prompts = [write.prompt(values) for values in (old, new)]
    prompts, answers = extended(prompts, [values[0][0].answer for values in (old, new)], template, text)
    name = f"edits-{template.name}-{number}"
    edited = Edited(old=prompts[0], answers=answers, family=template.family)
    return Case(name=name, source="fields", prompt=prompts[1], gold=[], edited=edited)


Values = list[tuple[Choice, str]]
"""Every field's choice, and the form of its value."""


def draw_values(template: Template, num_fields: int, rng: random.Random) -> tuple[Values, Values]:
    """All fields' values in the old and in the new prompt; the first `num_fields` differ."""
    old: Values = []
    new: Values = []
    for number, field in enumerate(template.fields):
        before = rng.choice(field.choices)
        others = [c for c in field.choices if c != before]
        if number == 0:
            others = [choice for choice in others if choice.answer != before.answer]
        after = rng.choice(others) if number < num_fields else before
        # Most values are short, so that long forms are preferred where there are any.
        forms = range(len(before.values))
        form, other = rng.choices(forms, [1 + form for form in forms], k=2)
        other = other if number < num_fields and rng.random() < 1 / 3 else form
        old.append((before, before.values[form]))
        new.append((after, after.values[other]))
    return old, new


class Writer:
    """Writes the prompts of a case: everything but the fields' values is the same in all of them."""

    def __init__(self, template: Template, text: ModelText, distance: int, rng: random.Random) -> None:
        self._template, self._text = template, text
        self._lines = self._shuffled(fillers()[template.filler])
        self._rng = rng
        self._rules = "\n".join(filter(None, (template.rules_title, *self._rule_lines())))
        self._behind_fields = self._filler(distance)
        is_short = template in templates(TemplateSet.WORDS)
        self._before_question = self._filler(rng.choice(SHORT_BEFORE_QUESTION if is_short else BEFORE_QUESTION))

    def prompt(self, values: Values) -> Ids:
        """The prompt with these values."""
        template = self._template
        pairs = zip(template.fields, values, strict=True)
        fields = "\n".join([field.line.replace("{value}", value) for field, (_, value) in pairs]) + template.after
        top = [template.head, fields, self._behind_fields]
        rules = [self._rules, self._before_question]
        match template.layout:
            case Layout.PLAIN:
                return self._text.ids(_joined(*top, *rules, f"{template.question}\n{template.lead}"))
            case Layout.SYSTEM:
                system, turns = _joined(*top, *rules), [template.question]
            case Layout.USER:
                system, turns = top[0], [_joined(*top[1:], *rules, template.question)]
            case Layout.TURNS:
                system, turns = _joined(*top), [_joined(*rules), template.reply, template.question]
        return self._text.conversation(system, turns) + self._text.ids(template.lead)

    def _rule_lines(self) -> Iterator[str]:
        for field in self._template.fields:
            for rule in field.rules:
                if not any(slot in rule for slot in ("{name}", "{via}", "{answer}")):
                    yield rule
                    continue
                for choice in self._rng.sample(field.choices, len(field.choices)):
                    named = rule.replace("{name}", choice.name).replace("{via}", choice.via)
                    yield named.replace("{answer}", choice.answer)

    def _shuffled(self, lines: Sequence[str]) -> Iterator[str]:
        """All lines in one order after another, of `[one|two]` one."""
        while True:
            for line in self._rng.sample(lines, len(lines)):
                yield _ALTERNATIVES.sub(lambda found: self._rng.choice(found[1].split("|")), line)

    def _filler(self, num_tokens: int) -> str:
        lines: list[str] = []
        while num_tokens > 0:
            lines.append(next(self._lines))
            num_tokens -= len(self._text.ids(lines[-1] + "\n"))
        return "\n".join(lines)


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def extended(
    prompts: list[Ids], answers: Sequence[str], template: Template, text: ModelText
) -> tuple[list[Ids], Tokens]:
    """The prompts with what both answers begin with behind them, and the tokens that come next.

    Raises:
        BenchError: one answer is the beginning of the other.
    """
    blank = "" if template.lead[-1:] in ("", '"', "'", "`", "\n") else " "
    old, new = (text.ids(blank + answer) for answer in answers)
    equal = common_len(old, new)
    if equal == min(len(old), len(new)):
        raise BenchError(f"template {template.name}: the answers {answers[0]!r} and {answers[1]!r} begin alike.")
    return [prompt + new[:equal] for prompt in prompts], Tokens(old[equal], new[equal])
