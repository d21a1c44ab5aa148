"""Declares settings by annotations with bounds and a description: `Annotated[int, Range(0, 64), "What it is."]`.

`check` refuses values out of bounds. `settings_of` lists settings, for help texts and the reference page.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from sglang_pic.errors import ConfigError


class Range(NamedTuple):
    """Bounds of a field, as in `Annotated[int, Range(0, 64)]`; with no upper bound, finite numbers above `low`."""

    low: float
    high: float = math.inf


class Setting(NamedTuple):
    """One declared setting."""

    name: str
    kind: Any
    """The type without its annotations."""
    default: Any
    description: str
    range: Range | None = None
    """`None` if the type alone says which values are allowed."""

    @property
    def allowed(self) -> str:
        """The allowed values, in words; empty if the type does not list them."""
        if get_origin(self.kind) is Literal:
            return f"one of {', '.join(map(str, get_args(self.kind)))}"
        if self.range is None:
            return ""
        number = "a number" if self.kind is float else "an integer"
        bounds = f"above {self.range.low}" if self.range.high == math.inf else "from {} to {}".format(*self.range)
        return f"{number} {bounds}"

    def allows(self, value: object) -> bool:
        """Whether `value` is allowed; `None` is if it is the default."""
        if get_origin(self.kind) is Literal:
            return value in get_args(self.kind)
        if self.range is None or (value is None and self.default is None):
            return True
        if isinstance(value, bool) or not isinstance(value, int | float if self.kind is float else int):
            return False
        low, high = self.range
        return low < value < high if high == math.inf else low <= value <= high


@cache
def settings_of(kind: type[msgspec.Struct]) -> dict[str, Setting]:
    """The settings of a struct by name, in order; those of a struct inside it are called `core.seam_tokens`."""
    found: dict[str, Setting] = {}
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            for inner in settings_of(field.type).values():
                name = f"{field.name}.{inner.name}"
                found[name] = inner._replace(name=name)
        else:
            plain, *extra = get_args(field.type) if hasattr(field.type, "__metadata__") else (field.type,)
            bounds = next((each for each in extra if isinstance(each, Range)), None)
            text = next((each for each in extra if isinstance(each, str)), "")
            found[field.name] = Setting(field.name, plain, field.default, text, bounds)
    return found


def check(struct: msgspec.Struct, **ranges: Range) -> None:
    """Refuse settings out of their bounds; `ranges` replace declared bounds.

    Raises:
        ConfigError: it names the setting, its value and the allowed values.
    """
    for name, declared in settings_of(type(struct)).items():
        setting = declared._replace(range=ranges[name]) if name in ranges else declared
        if "." not in name and not setting.allows(value := getattr(struct, name)):
            way_out = "leave it out for no limit" if setting.default is None else f"{setting.default!r} is the default"
            raise ConfigError(f"{name}={value!r}: must be {setting.allowed}; {way_out}.")
