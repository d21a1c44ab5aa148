"""Reads SGLang's source as syntax trees, without importing its modules, which would take seconds.

It is the installed SGLang's, or within `reading` that of a folder.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_folder: Path | None = None
"""The folder of the package that is read in place of the installed one."""


@contextmanager
def reading(package: Path) -> Iterator[None]:
    """Read the package in a folder, such as `python/sglang` of SGLang's repository, in place of the installed one."""
    global _folder  # noqa: PLW0603
    forget()
    _folder = package
    try:
        yield
    finally:
        _folder = None
        forget()


def find(path: str) -> tuple[ast.AST, str] | None:
    """The definition of a dotted path and its source; None if there is none."""
    parts = path.split(".")
    for split in range(len(parts) - 1, 1, -1):
        module = _parse(".".join(parts[:split]))
        if module is not None:
            tree, lines = module
            node: ast.AST = tree
            for name in parts[split:]:
                member = member_of(node, name)
                if member is None:
                    return None
                node = member
            first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", len(lines))
            return node, "".join(lines[first - 1 : last])
    return None


def member_of(node: ast.AST, name: str) -> ast.AST | None:
    """The function, class or assignment called `name` in the body of a module or class."""
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name == name:
            return child
        targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return child
    return None


def parameters_of(node: ast.AST) -> set[str]:
    """The parameters of a function or of a class's `__init__`, or the fields of a class without one."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        return {arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    init = member_of(node, "__init__")
    if init is not None:
        return parameters_of(init)
    fields = (child.target for child in getattr(node, "body", ()) if isinstance(child, ast.AnnAssign))
    return {target.id for target in fields if isinstance(target, ast.Name)}


def forget() -> None:
    """Free the syntax trees that were read."""
    _parse.cache_clear()


@functools.cache
def _parse(module: str) -> tuple[ast.Module, list[str]] | None:
    # Looking a submodule up by name would import its parent packages.
    top, *rest = module.split(".")
    for folder in _folders(top):
        for file in (Path(folder, *rest).with_suffix(".py"), Path(folder, *rest, "__init__.py")):
            if file.is_file():
                text = file.read_text(encoding="utf8")
                return ast.parse(text), text.splitlines(keepends=True)
    return None


def _folders(top: str) -> list[Path]:
    if _folder is not None:
        return [_folder]
    spec = importlib.util.find_spec(top)
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
