"""Digests of the functions of SGLang that the adapter relies on, by the versions that it was tested with.

The contract checks a function's name and parts; an equal digest shows that its body was tested. Formatting, comments
and docstrings do not count. An unknown digest is logged and does not stop the server: the checks of the live model
decide.
"""

from __future__ import annotations

import ast
import hashlib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from sglang_pic.adapter.sglang import source

TABLE: Final = Path(__file__).with_suffix(".toml")


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
    return [path for path in paths if digest_of(path) not in TESTED_BODIES.get(path, {})]


def digest(node: ast.AST) -> str:
    """The digest of a definition's syntax tree without docstrings, 12 hexadecimal digits.

    Empty fields do not count, so it is the same with every version of Python.
    """
    return hashlib.sha256(_shape(node).encode()).hexdigest()[:12]


def digest_of(path: str) -> str | None:
    """The digest of a definition in the SGLang that is read; None if it has none."""
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
