"""The prompts of the experiment EDITS as data: templates with fields, and lines that draw nothing from any field.

edits/find.toml is for finding a rule, edits/report.toml for judging one: no template is in both. A prompt is

    head | fields | after | filler | rules | filler | question | lead        the answer follows

and the old and the new prompt differ in the values of the first fields alone.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from pathlib import Path

import msgspec

from pic_bench.fidelity.record import Family, TemplateSet
from sglang_pic.errors import ConfigError

_FOLDER = Path(__file__).with_name("edits")


class Layout(Enum):
    """Which messages the parts of a prompt are in."""

    SYSTEM = "system"
    """All in the system message, the question in the user's."""
    USER = "user"
    """The head in the system message, all the rest in the user's."""
    TURNS = "turns"
    """Head and fields in the system message, rules in a first message that was answered, then the question."""
    PLAIN = "plain"
    """Plain text, no chat template."""


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One value of a field."""

    name: str
    """What the rules call it, and the shortest form of the value."""
    forms: tuple[str, ...] = ()
    """Longer forms for the field's line; of choices of one field as many each, the lengths alike."""
    via: str = ""
    """What the rules put between the name and the answer."""
    answer: str = ""
    """What follows the prompt under this value, without the blank before it."""

    @property
    def values(self) -> tuple[str, ...]:
        """Every form, the shortest first."""
        return self.name, *self.forms


class Field(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field of a prompt."""

    line: str
    """Contains `{value}`."""
    choices: tuple[Choice, ...]
    """Two or more."""
    rules: tuple[str, ...] = ()
    """Lines that draw on the field; one with `{name}`, `{via}` or `{answer}` stands once for each choice."""

    def __post_init__(self) -> None:
        if "{value}" not in self.line:
            raise ConfigError(f"line={self.line!r}: must contain {{value}}.")
        if len({choice.name for choice in self.choices}) < max(2, len(self.choices)):
            raise ConfigError(f"line={self.line!r}: needs two or more choices with names of their own.")
        if len({len(choice.forms) for choice in self.choices}) > 1:
            raise ConfigError(f"line={self.line!r}: give every choice as many forms.")


class Template(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt whose fields may change; texts are used as they are, lines are joined by line breaks."""

    name: str
    """Unique over both sets; letters, digits and `-`."""
    family: Family
    layout: Layout
    head: str
    """40 tokens or more: the first 32 positions of a prompt never donate."""
    fields: tuple[Field, ...]
    """1 to 4; the first is the one that is asked for."""
    after: str = ""
    """What closes the fields, such as the end of a JSON object."""
    filler: str
    """Name of the lines in fillers.toml."""
    rules_title: str = ""
    reply: str = "Understood."
    """The model's to the first message, of TURNS."""
    question: str
    lead: str = ""
    """How the answer begins."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.fields) <= 4:
            raise ConfigError(f"{self.name}: {len(self.fields)} fields; give 1 to 4.")
        if self.filler not in fillers():
            raise ConfigError(f"{self.name}: filler={self.filler!r}: must be one of {', '.join(fillers())}.")
        if len({choice.answer for choice in self.fields[0].choices}) < 2 and self.family.is_gated:
            raise ConfigError(f"{self.name}: the first field has one answer only; of {self.family.value} give two.")


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    templates: tuple[Template, ...]


@cache
def fillers() -> dict[str, tuple[str, ...]]:
    """Lines that draw on no field, by the name of their style."""
    return msgspec.toml.decode((_FOLDER / "fillers.toml").read_bytes(), type=dict[str, tuple[str, ...]])


@cache
def templates(of: TemplateSet) -> tuple[Template, ...]:
    """The templates of a set, in the file's order.

    Raises:
        ConfigError: the file holds something else; the message names it.
    """
    path = _FOLDER / f"{of.value}.toml"
    try:
        return msgspec.toml.decode(path.read_bytes(), type=_File).templates
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path.name}: {error}.") from error
