"""Stand-ins for msgspec, xxhash and fastcdc, for a machine that has torch, triton and numpy and no package registry.

They let the server's own planner, layout and splicer run there unchanged. What they give is right but slower: chunks
are named by BLAKE2 in place of xxh3 and cut by a plain gear hash in place of FastCDC, so a plan takes longer than with
the packages. Only what this project calls is there.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Iterator
from enum import Enum
from functools import cache, partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import get_annotations
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np


def install() -> list[str]:
    """Put a stand-in in the place of each of the three packages that is missing; the names of those that were."""
    made = {"msgspec": _msgspec, "xxhash": _xxhash, "fastcdc": _fastcdc}
    missing = [name for name in made if name not in sys.modules and find_spec(name) is None]
    for name in missing:
        for module in made[name]():
            module.__dict__["__stand_in__"] = True
            # Whoever asks with `find_spec` whether the package is there gets an answer, not an error.
            module.__spec__ = ModuleSpec(module.__name__, None)
            sys.modules[module.__name__] = module
    return missing


def installed() -> list[str]:
    """The packages that stand-ins replace in this process."""
    return [name for name in ("msgspec", "xxhash", "fastcdc") if hasattr(sys.modules.get(name), "__stand_in__")]


class Struct:
    """A dataclass with msgspec's spelling: defaults may be mutable, and are copied for each instance."""

    def __init_subclass__(cls, *, frozen: bool | None = None, kw_only: bool = False, **_options: object) -> None:
        super().__init_subclass__()
        for name in get_annotations(cls):
            default = cls.__dict__.get(name)
            if isinstance(default, dict | list | set):
                setattr(cls, name, dataclasses.field(default_factory=partial(copy.copy, default)))
        above = getattr(cls, "__dataclass_params__", None)
        is_frozen = frozen if frozen is not None else above is not None and above.frozen
        dataclasses.dataclass(frozen=is_frozen, kw_only=kw_only)(cls)


class ValidationError(ValueError):
    """A value is not of the type that was asked for."""


class _Field(NamedTuple):
    name: str
    type: Any
    default: Any
    encode_name: str


@cache
def _fields(kind: Any) -> tuple[_Field, ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        _Field(each.name, hints[each.name], each.default, each.metadata.get("name", each.name))
        for each in dataclasses.fields(kind)
    )


def _field(*, name: str | None = None, **options: Any) -> Any:
    """A field of a struct, under another name in JSON."""
    return dataclasses.field(metadata={} if name is None else {"name": name}, **options)


def _to_builtins(value: Any) -> Any:
    """Structs as dictionaries; numbers that JSON does not have are null."""
    if isinstance(value, Struct):
        return {each.encode_name: _to_builtins(getattr(value, each.name)) for each in _fields(type(value))}  # type: ignore[arg-type]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {_to_builtins(key): _to_builtins(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_builtins(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _convert(value: Any, kind: Any) -> Any:
    """`value`, as JSON has it, as `kind`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _convert(value, args[0])
    if origin in (Union, UnionType):
        return None if value is None else _convert(value, next(arg for arg in args if arg is not type(None)))
    if origin is dict:
        return {_convert(key, args[0]): _convert(each, args[1]) for key, each in value.items()}
    if origin in (list, tuple):
        return origin(_convert(each, args[0]) for each in value)
    if isinstance(kind, type) and issubclass(kind, Struct):
        known = {field.encode_name: field for field in _fields(kind)}  # type: ignore[arg-type]
        if not isinstance(value, dict) or not value.keys() <= known.keys():
            raise ValidationError(f"{kind.__name__}: {value!r}: must be an object with any of {', '.join(known)}.")
        return kind(**{known[name].name: _convert(each, known[name].type) for name, each in value.items()})
    is_made = isinstance(kind, type) and (kind is float or issubclass(kind, Enum))
    return kind(value) if is_made else value


def _msgspec() -> list[ModuleType]:
    def decode(data: bytes | str, *, type: Any = Any) -> Any:
        return _convert(json.loads(data), type)

    def write(value: Any) -> bytes:
        return json.dumps(_to_builtins(value), separators=(",", ":")).encode()

    def pretty(data: bytes, *, indent: int = 2) -> bytes:
        return json.dumps(json.loads(data), indent=indent).encode()

    whole, as_json, structs = (ModuleType(name) for name in ("msgspec", "msgspec.json", "msgspec.structs"))
    vars(as_json).update(decode=decode, encode=write, format=pretty)
    vars(structs).update(replace=dataclasses.replace, fields=_fields)
    vars(whole).update(Struct=Struct, field=_field, to_builtins=_to_builtins, json=as_json, structs=structs)
    vars(whole).update(DecodeError=ValueError, ValidationError=ValidationError, MsgspecError=ValueError)
    return [whole, as_json, structs]


def _xxhash() -> list[ModuleType]:
    def digest(data: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    module = ModuleType("xxhash")
    vars(module).update(xxh3_64_intdigest=digest)
    return [module]


_WINDOW = 32  # bytes that a cut depends on


class _Chunk(NamedTuple):
    offset: int
    length: int


def _fastcdc() -> list[ModuleType]:
    gear = np.random.default_rng(1).integers(0, 1 << 32, 256, dtype=np.uint32)

    def fastcdc(data: Any, min_size: int, avg_size: int, max_size: int) -> Iterator[_Chunk]:
        """Cuts where the hash of the last bytes begins with zeros, no sooner than `min_size` behind the last cut."""
        values = gear[np.frombuffer(data, dtype=np.uint8)]
        hashes = np.zeros_like(values)
        for age in range(min(_WINDOW, len(values))):
            hashes[age:] += values[: len(values) - age] << np.uint32(age)
        zeros = max(1, round(math.log2(max(2, avg_size - min_size))))
        cuts = np.flatnonzero(hashes >> np.uint32(32 - zeros) == 0) + 1
        start, size = 0, len(values)
        while start < size:
            found = int(np.searchsorted(cuts, start + min_size))
            end = min(start + max_size, size, int(cuts[found]) if found < len(cuts) else size)
            yield _Chunk(start, end - start)
            start = end

    module = ModuleType("fastcdc")
    vars(module).update(fastcdc=fastcdc)
    return [module]
