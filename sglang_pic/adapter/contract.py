"""Checks every symbol of SGLang that this adapter relies on, before anything is registered.

`contract.toml` is the table of functions and classes: where each one is, its parameters, words that its source must
hold. `seams.py` names the members of SGLang's objects that our code reads and writes, as types for mypy; the same names
are looked up here in the installed SGLang.

SGLang swallows the exceptions of plugins, so a half-registered plugin would serve without its cache and say nothing; a
missing or changed symbol must stop the server with one line instead.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from sglang_pic.adapter.seams import SEAMS, members
from sglang_pic.errors import ContractError

BUILT_FOR = "0.5.23"


class Symbol(NamedTuple):
    """One symbol."""

    path: str
    parameters: tuple[str, ...] = ()
    """Parameters that we pass or receive."""
    source_has: tuple[str, ...] = ()
    """What its source must hold, for attributes which only instances have."""
    why: str = ""


def _read_table() -> tuple[Symbol, ...]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf8"))["symbols"]
    listed = (
        Symbol(row["path"], tuple(row.get("parameters", ())), tuple(row.get("source_has", ())), row["why"])
        for row in table
    )
    used = (Symbol(path, (), members(seam), "members that are read or written") for seam, path in SEAMS.items())
    return (*listed, *used)


CONTRACT = _read_table()


def check_contract(contract: tuple[Symbol, ...] = CONTRACT) -> None:
    """Check every symbol against the installed SGLang.

    Raises:
        ContractError: one line that names the first symbol that is missing or changed, and the versions.
    """
    try:
        for symbol in contract:
            problem = _problem(symbol)
            if problem:
                raise ContractError(
                    f"{symbol.path} {problem} in the installed SGLang {_installed_version()}; sglang_pic was built for "
                    f"{BUILT_FOR} and needs it for {symbol.why}. Install "
                    f"sglang=={BUILT_FOR}, or start without --radix-cache-backend pic."
                )
    finally:
        # Syntax trees of SGLang's largest files: needed once, and every process of a server would keep them.
        _parse.cache_clear()


def _problem(symbol: Symbol) -> str | None:
    found = _find(symbol.path)
    if found is None:
        return "is missing"
    node, source = found
    lacking = [name for name in symbol.parameters if name not in _parameters(node)]
    if lacking:
        return f"has no parameter {lacking[0]!r}"
    lacking = [word for word in symbol.source_has if not _holds(source, word)]
    if lacking:
        return f"no longer has {lacking[0]!r}"
    return None


def _holds(source: str, text: str) -> bool:
    # A name must be a whole word; any other text is looked for as it is.
    return re.search(rf"\b{text}\b", source) is not None if text.isidentifier() else text in source


def _find(path: str) -> tuple[ast.AST, str] | None:
    """The definition of a dotted path and its source, without importing the module it is in.

    NOTE: importing every module here would add seconds to each process of a server.
    """
    parts = path.split(".")
    for split in range(len(parts) - 1, 1, -1):
        module = _parse(".".join(parts[:split]))
        if module is not None:
            tree, lines = module
            node: ast.AST = tree
            for name in parts[split:]:
                member = _member(node, name)
                if member is None:
                    return None
                node = member
            first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", len(lines))
            return node, "".join(lines[first - 1 : last])
    return None


@functools.cache
def _parse(module: str) -> tuple[ast.Module, list[str]] | None:
    # Looking a submodule up by name would import its parent packages.
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in (Path(folder, *rest).with_suffix(".py"), Path(folder, *rest, "__init__.py")):
            if file.is_file():
                text = file.read_text(encoding="utf8")
                return ast.parse(text), text.splitlines(keepends=True)
    return None


def _member(node: ast.AST, name: str) -> ast.AST | None:
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name == name:
            return child
        targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return child
    return None


def _parameters(node: ast.AST) -> set[str]:
    """Parameters of a function, or the fields of a class that is made from its annotations."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        return {arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    init = _member(node, "__init__")
    if init is not None:
        return _parameters(init)
    fields = (child.target for child in getattr(node, "body", ()) if isinstance(child, ast.AnnAssign))
    return {target.id for target in fields if isinstance(target, ast.Name)}


def _installed_version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "(not installed)"
