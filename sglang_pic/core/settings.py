"""Declares settings: the default, the allowed values and the description of a setting stand in its annotation.

`check` reads the declarations to refuse bad values, `settings_of` gives them to help texts and to the reference page.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple, NoReturn

import msgspec

from sglang_pic.errors import ConfigError

__all__ = ["Allowed", "Choice", "Integers", "Numbers", "Setting", "check", "refuse", "setting", "settings_of"]


class Integers(NamedTuple):
    """Whole numbers from `low` to `high`, both included."""

    low: int
    high: int

    def holds(self, value: object) -> bool:
        """Whether `value` is allowed."""
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"an integer from {self.low} to {self.high}"


class Numbers(NamedTuple):
    """Numbers from `low` to `high`, both included; with no upper bound, finite numbers above `low`."""

    low: float
    high: float = math.inf

    def holds(self, value: object) -> bool:
        """Whether `value` is allowed."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        return self.low < value < math.inf if self.high == math.inf else self.low <= value <= self.high

    def __str__(self) -> str:
        return f"a number above {self.low}" if self.high == math.inf else f"a number from {self.low} to {self.high}"


class Choice(NamedTuple):
    """One of a few integers."""

    values: tuple[int, ...]

    def holds(self, value: object) -> bool:
        """Whether `value` is allowed."""
        return value in self.values

    def __str__(self) -> str:
        return f"one of {', '.join(map(str, self.values))}"


Allowed = Integers | Numbers | Choice


class Setting(NamedTuple):
    """One declared setting."""

    name: str
    default: Any
    description: str
    """One sentence for an operator."""
    allowed: Allowed | None
    """`None` where the type says it: a choice of words, or an object."""

    @property
    def short_name(self) -> str:
        """The name without its unit, for command lines: `seam` for `seam_tokens`."""
        return self.name.removesuffix("_tokens").removesuffix("_percent")


def setting(allowed: Allowed | None, description: str) -> msgspec.Meta:
    """What a field's `Annotated` carries to declare a setting."""
    return msgspec.Meta(description=description, extra={"allowed": allowed})


@cache
def settings_of(kind: type[msgspec.Struct]) -> dict[str, Setting]:
    """The declared settings of a struct by name, in order; those of a nested struct are called `core.seam_tokens`."""
    found: dict[str, Setting] = {}
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            for nested in settings_of(field.type).values():
                name = f"{field.name}.{nested.name}"
                found[name] = nested._replace(name=name)
        for meta in getattr(field.type, "__metadata__", ()):
            found[field.name] = Setting(field.name, field.default, meta.description, meta.extra["allowed"])
    return found


def check(struct: msgspec.Struct) -> None:
    """Refuse a struct with a setting out of bounds; `None` is allowed where `None` is the default.

    Raises:
        ConfigError: naming the setting, its value and what is allowed.
    """
    for name, declared in settings_of(type(struct)).items():
        if declared.allowed is not None and "." not in name:
            value = getattr(struct, name)
            if not (declared.allowed.holds(value) or (value is None and declared.default is None)):
                refuse(struct, name, declared.allowed)


def refuse(struct: msgspec.Struct, name: str, allowed: object) -> NoReturn:
    """Raise the error that says what is `allowed` in place of a setting's value.

    Raises:
        ConfigError: always.
    """
    default = settings_of(type(struct))[name].default
    way_out = "leave it out for no limit" if default is None else f"{default!r} is the default"
    raise ConfigError(f"{name}={getattr(struct, name)!r}: must be {allowed}; {way_out}.")
