"""The options that all workloads share, and how options are read from a `gen:` spec and described.

An option's meaning and limits stand once, in the field's `Meta`, for errors and documentation alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta
from msgspec.inspect import EnumType, FloatType, IntType, Metadata, Type, multi_type_info
from pic_traces.errors import TraceError
from pic_traces.session import Session

if TYPE_CHECKING:
    from pic_generate.session_writer import WriterFactory


Calls = Annotated[int, Meta(ge=1, description="LLM calls of a session")]
"""Type of the option `calls`, for workloads with another default."""

Sessions = Annotated[int, Meta(ge=1, description="number of sessions")]
"""Type of the option `sessions`, for workloads with another default."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of all workloads; a workload adds its own sizes and writes its sessions.

    A condition between several options belongs in `__post_init__`, as a ValueError that begins with `key=value: `.
    """

    calls: Calls = 20
    sessions: Sessions = 4
    seed: Annotated[int, Meta(description="another seed, another text")] = 1
    tokenizer: Annotated[str | None, Meta(description="folder with `tokenizer.json`: exact lengths")] = None

    def write(self, writers: WriterFactory) -> Iterator[Session]:
        """Yield the sessions, in order; the same options give the same sessions in every process."""
        raise NotImplementedError


class Option(NamedTuple):
    """One option, described: its default as in a spec (empty if there is none), its meaning, its allowed values."""

    name: str
    default: str
    meaning: str
    allowed: str
    is_shared: bool
    """Whether all workloads have it."""


OptionsT = TypeVar("OptionsT", bound=Options)


def list_options(kind: type[Options]) -> list[Option]:
    """The options of a workload, its own first, in the order of their declaration."""
    (info,) = multi_type_info([kind])
    assert isinstance(info, msgspec.inspect.StructType)
    found = []
    for field in info.fields:
        bare, meaning = _unwrap(field.type)
        default = getattr(field.default, "value", field.default)
        found.append(
            Option(
                name=field.name,
                default="" if default is None else str(default),
                meaning=meaning,
                allowed=_allowed(bare),
                is_shared=field.name in Options.__struct_fields__,
            )
        )
    return sorted(found, key=lambda option: option.is_shared)


def parse_options(query: str, kind: type[OptionsT]) -> OptionsT:
    """The options that `key=value&key=value` says; all others have their defaults.

    Raises:
        TraceError: an option is unknown, set twice or not allowed. The message does not name the spec.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise TraceError(f"options are written key=value&key=value ({error})") from error
    keys = [key for key, _ in pairs]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        raise TraceError(f"{', '.join(repeated)} is set twice; set each option once")
    options = {option.name: option for option in list_options(kind)}
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    values = {}
    for key, text in pairs:
        if key not in options:
            raise TraceError(f"unknown option {key!r}; allowed are {', '.join(options)}")
        try:
            values[key] = msgspec.convert(text, types[key], strict=False)
        except msgspec.ValidationError as error:
            default = f"; {options[key].default} is the default" if options[key].default else ""
            raise TraceError(f"{key}={text!r}: must be {options[key].allowed}{default}") from error
    try:
        return kind(**values)
    except ValueError as error:
        raise TraceError(str(error)) from error


def _unwrap(type_: Type) -> tuple[Type, str]:
    meaning = ""
    while isinstance(type_, Metadata):
        meaning = str((type_.extra_json_schema or {}).get("description", meaning))
        type_ = type_.type
    return type_, meaning


def _allowed(type_: Type) -> str:
    match type_:
        case EnumType(cls=cls):
            return f"one of {', '.join(str(member.value) for member in cls)}"
        case IntType(ge=low, le=high) | FloatType(ge=low, le=high):
            word = "a whole number" if isinstance(type_, IntType) else "a number"
            if low is not None and high is not None:
                return f"{word} between {low} and {high}"
            return word if low is None else f"{word}, {low} or more"
        case _:
            return "text"
