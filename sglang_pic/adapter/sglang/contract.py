"""Checks every symbol of SGLang that this adapter relies on, before anything is registered.

`contract.toml` names the functions and classes, their parameters and words that their source must contain, with a table
for each feature of symbols that only some servers need. `seams.py` names the members of SGLang's objects that our code
reads and writes, as types for mypy; they are looked up in the installed SGLang, too.

SGLang swallows the exceptions of plugins, so a half-registered plugin would silently serve without its cache. A missing
or changed symbol stops the server with one line instead.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from sglang_pic.adapter.sglang import bodies, source
from sglang_pic.adapter.sglang.seams import FEATURE_SEAMS, SEAMS, members
from sglang_pic.errors import ContractError

BUILT_FOR = "0.5.23"


class Symbol(NamedTuple):
    """One symbol."""

    path: str
    parameters: tuple[str, ...] = ()
    """Parameters that we pass or receive."""
    source_has: tuple[str, ...] = ()
    """Words that its source must contain, for attributes that only instances have."""
    why: str = ""


_FILE: Final = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf8"))
_TABLES: Final = {
    name: tuple(
        Symbol(row["path"], tuple(row.get("parameters", ())), tuple(row.get("source_has", ())), row["why"])
        for row in rows
    )
    for name, rows in _FILE.items()
    if name != "attention"
}

FRONT: Final = _TABLES["front"]
"""Symbols that every process with the plugin needs, with any backend."""

HTTP: Final = _TABLES["http"]
"""Symbols that processes with an HTTP server need."""


def _of(seams: Mapping[type, str]) -> Iterator[Symbol]:
    return (Symbol(path, (), members(seam), "members that are read or written") for seam, path in seams.items())


def _hooks() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for row in chain.from_iterable(rows for name, rows in _FILE.items() if name != "attention"):
        for owner, when in row.get("hooks", {}).items():
            found.setdefault(owner, {})[row["path"]] = when
    return found


HOOKS: Final = _hooks()
"""For each of our modules, the functions of SGLang that it wraps, and `before`, `after` or `around`."""

CONTRACT: Final = (*FRONT, *_TABLES["symbols"], *_of(SEAMS))
"""Symbols that every server with the backend needs."""

FEATURES: Final = {
    name: (*symbols, *_of(FEATURE_SEAMS.get(name, {})))
    for name, symbols in _TABLES.items()
    if name not in ("front", "http", "symbols")
}
"""Symbols by the feature that needs them; `support.py` says which servers have it."""

BODIES: Final = tuple(symbol.path for symbols in _TABLES.values() for symbol in symbols)
"""The paths in the table of digests, beside `ATTENTION_BODIES`."""

ATTENTION_BODIES: Final[dict[str, tuple[str, ...]]] = {name: tuple(paths) for name, paths in _FILE["attention"].items()}
"""The functions of each attention backend that were read before it was admitted: they build its tables, and write rows
before they read any. Our code does not use them, so only their digests are checked."""


def check_contract(contract: Sequence[Symbol] = CONTRACT, *, without: str = "--radix-cache-backend pic") -> list[str]:
    """Check every symbol against the installed SGLang.

    Args:
        contract: the symbols.
        without: the flag that the error asks the operator to remove.

    Returns:
        The paths of symbols whose digests were not tested.

    Raises:
        ContractError: one line that names the first symbol that is missing or changed, and the versions.
    """
    try:
        for symbol in contract:
            problem = problem_of(symbol)
            if problem:
                raise ContractError(
                    f"{symbol.path} {problem} in the installed SGLang {installed_version()}; sglang_pic was built for "
                    f"{BUILT_FOR} and needs it for {symbol.why}. Install "
                    f"sglang=={BUILT_FOR}, or start without {without}."
                )
        return bodies.changed_bodies(symbol.path for symbol in contract if symbol.path in BODIES)
    finally:
        # Free the syntax trees of SGLang's largest files.
        source.forget()


def problem_of(symbol: Symbol) -> str | None:
    """How the source that is read breaks one line of the contract; None where it does not."""
    found = source.find(symbol.path)
    if found is None:
        return "is missing"
    node, text = found
    lacking = [name for name in symbol.parameters if name not in source.parameters_of(node)]
    if lacking:
        return f"has no parameter {lacking[0]!r}"
    lacking = [word for word in symbol.source_has if not _holds(text, word)]
    if lacking:
        return f"no longer has {lacking[0]!r}"
    return None


def changed_attention(backend: str) -> list[str]:
    """The functions of an attention backend that differ from the tested ones; none for an untested backend."""
    try:
        return bodies.changed_bodies(ATTENTION_BODIES.get(backend, ()))
    finally:
        source.forget()


def describe_changes(changed: Sequence[str]) -> str:
    """One line for the operator about functions whose bodies were never tested."""
    tested = " or ".join(bodies.known_versions())
    names = ", ".join(path.removeprefix("sglang.srt.") for path in changed)
    counted = "1 function" if len(changed) == 1 else f"{len(changed)} functions"
    return (
        f"SGLang {installed_version()} differs from {tested}, which was tested, in {counted} that the cache relies on: "
        f"{names}. Start-up checks the live model all the same; for the tested version install sglang=={BUILT_FOR}."
    )


def _holds(source_text: str, word: str) -> bool:
    # A name must be a whole word; other text may be anywhere.
    return re.search(rf"\b{word}\b", source_text) is not None if word.isidentifier() else word in source_text


@functools.cache
def installed_version() -> str:
    """The version of the installed SGLang, cached."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "(not installed)"
