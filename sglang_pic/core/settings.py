"""Declares settings: a field's annotation has the bounds, the text below the field is its description.

`check` refuses values out of bounds. `settings_of` lists what is declared, for help texts and the reference page.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from functools import cache
from typing import Any, NamedTuple, NoReturn

import msgspec

from sglang_pic.errors import ConfigError

__all__ = ["Range", "Setting", "check", "refuse", "settings_of"]


class Range(NamedTuple):
    """Bounds of a field, as in `Annotated[int, Range(0, 64)]`; with no upper bound, finite numbers above `low`."""

    low: float
    high: float = math.inf


class Setting(NamedTuple):
    """One declared setting."""

    name: str
    default: Any
    description: str
    """The docstring of the field."""
    range: Range | None
    """`None` where the type says what is allowed."""
    is_whole: bool

    @property
    def short_name(self) -> str:
        """The name without its unit, for command lines: `seam` for `seam_tokens`."""
        return self.name.removesuffix("_tokens").removesuffix("_percent")

    @property
    def allowed(self) -> str:
        """The range in words."""
        low, high = self.range or Range(-math.inf)
        bounds = f"above {low}" if high == math.inf else f"from {low} to {high}"
        return f"{'an integer' if self.is_whole else 'a number'} {bounds}"

    def at_most(self, high: float) -> Setting:
        """The setting with an upper bound of `high` or less."""
        assert self.range is not None, "only a range has bounds"
        return self._replace(range=Range(self.range.low, min(high, self.range.high)))

    def allows(self, value: object) -> bool:
        """Whether `value` is in the range; `None` is where it is the default."""
        if self.range is None or (value is None and self.default is None):
            return True
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else int | float):
            return False
        low, high = self.range
        return low < value < high if high == math.inf else low <= value <= high


@cache
def settings_of(kind: type[msgspec.Struct]) -> dict[str, Setting]:
    """The settings of a struct by name, in order; those of a struct inside it are called `core.seam_tokens`."""
    described = {name: text for base in reversed(kind.__mro__) for name, text in _docstrings(base).items()}
    found: dict[str, Setting] = {}
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            for nested in settings_of(field.type).values():
                name = f"{field.name}.{nested.name}"
                found[name] = nested._replace(name=name)
            continue
        metadata = getattr(field.type, "__metadata__", ())
        bounds = next((each for each in metadata if isinstance(each, Range)), None)
        is_whole = getattr(field.type, "__origin__", None) is not float
        found[field.name] = Setting(field.name, field.default, described.get(field.name, ""), bounds, is_whole)
    return found


def check(struct: msgspec.Struct) -> None:
    """Refuse a struct with a setting out of bounds.

    Raises:
        ConfigError: naming the setting, its value and what is allowed.
    """
    for name, setting in settings_of(type(struct)).items():
        if setting.range is not None and "." not in name and not setting.allows(getattr(struct, name)):
            refuse(struct, name, setting.allowed)


def refuse(struct: msgspec.Struct, name: str, allowed: str) -> NoReturn:
    """Raise the error that says what is `allowed` in place of a setting's value.

    Raises:
        ConfigError: always.
    """
    default = settings_of(type(struct))[name].default
    way_out = "leave it out for no limit" if default is None else f"{default!r} is the default"
    raise ConfigError(f"{name}={getattr(struct, name)!r}: must be {allowed}; {way_out}.")


def _docstrings(kind: type) -> dict[str, str]:
    """The text below each field of a struct, with its line breaks taken out."""
    if not issubclass(kind, msgspec.Struct) or kind is msgspec.Struct:
        return {}
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    found = {}
    if isinstance(body, ast.ClassDef):
        for field, text in zip(body.body, body.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found[name] = " ".join(words.split())
    return found
