"""Digests of the functions of SGLang that the adapter relies on, by the versions that it was tested with.

The contract checks a function's name and parts; an equal digest shows that its body was tested. Formatting, comments
and docstrings do not count. An unknown digest is logged and does not stop the server: the checks of the live model
decide.
"""

from __future__ import annotations

import ast
import hashlib
import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from sglang_pic.adapter.sglang import source

TABLE: Final = Path(__file__).with_suffix(".toml")
_HEADER: Final = """\
# Digests of the functions and classes of SGLang that contract.toml names, each with the versions that have it.
# Written by `make contract`; bodies.py compares them with the installed SGLang when a server starts.
"""


def read_table(file: Path) -> dict[str, dict[str, tuple[str, ...]]]:
    """For each path, the tested digests with the versions of SGLang that have them."""
    table = tomllib.loads(file.read_text(encoding="utf8"))
    return {path: {found: tuple(versions) for found, versions in digests.items()} for path, digests in table.items()}


TESTED_BODIES: Mapping[str, Mapping[str, tuple[str, ...]]] = read_table(TABLE)


def known_versions() -> tuple[str, ...]:
    """The versions of SGLang with digests in the table, the latest first."""
    versions = {one for digests in TESTED_BODIES.values() for found in digests.values() for one in found}
    return tuple(sorted(versions, key=lambda version: [int(part) for part in version.split(".")], reverse=True))


def changed_bodies(paths: Iterable[str]) -> list[str]:
    """The `paths` whose definition in the installed SGLang is missing or was not tested."""
    return [path for path in paths if _digest_of(path) not in TESTED_BODIES.get(path, {})]


def add_version(paths: Iterable[str], version: str, *, lacking: Collection[str] = ()) -> int:
    """Write the table again with the digests of `paths` in the installed SGLang.

    Args:
        paths: all paths of the table.
        version: the installed SGLang's.
        lacking: those of `paths` that no server relies on with this version.

    Returns:
        How many digests of `version` the table has.
    """
    table: dict[str, dict[str, list[str]]] = {path: {} for path in sorted(paths)}
    for path, digests in table.items():
        for known, versions in TESTED_BODIES.get(path, {}).items():
            digests[known] = [one for one in versions if one != version]
        found = None if path in lacking else _digest_of(path)
        if found is not None:
            digests.setdefault(found, []).append(version)
    lines = [f'"{path}" = {{ {", ".join(_entries(digests))} }}\n' for path, digests in table.items()]
    TABLE.write_text(f"{_HEADER}\n{''.join(lines)}", encoding="utf8")
    return sum(version in versions for digests in table.values() for versions in digests.values())


def _entries(digests: Mapping[str, list[str]]) -> list[str]:
    return [f"{found} = {json.dumps(sorted(versions))}" for found, versions in digests.items() if versions]


def digest(node: ast.AST) -> str:
    """The digest of a definition's syntax tree without docstrings, 12 hexadecimal digits.

    Empty fields do not count, so it is the same with every version of Python.
    """
    return hashlib.sha256(_shape(node).encode()).hexdigest()[:12]


def _digest_of(path: str) -> str | None:
    found = source.find(path)
    return None if found is None else digest(found[0])


def _shape(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_shape, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [(name, _without_docstring(value, name)) for name in value._fields]
    shown = (f"{name}={_shape(field)}" for name, field in fields if field not in (None, []))
    return f"{type(value).__name__}({','.join(shown)})"


def _without_docstring(node: ast.AST, name: str) -> object:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and name == "body":
        return node.body if ast.get_docstring(node, clean=False) is None else node.body[1:]
    return getattr(node, name, None)
