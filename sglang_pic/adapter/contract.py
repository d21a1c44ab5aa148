"""Checks every symbol of SGLang that this adapter relies on, before anything is registered.

`contract.toml` is the table of functions and classes: where each one is, its parameters, words that its source must
hold. `seams.py` names the members of SGLang's objects that our code reads and writes, as types for mypy; the same names
are looked up here in the installed SGLang.

SGLang swallows the exceptions of plugins, so a half-registered plugin would serve without its cache and say nothing; a
missing or changed symbol must stop the server with one line instead.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, NamedTuple

from sglang_pic.adapter import bodies, source
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


_TABLE: Final = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf8"))
_LISTED, DRAFT = (
    tuple(
        Symbol(row["path"], tuple(row.get("parameters", ())), tuple(row.get("source_has", ())), row["why"])
        for row in _TABLE[name]
    )
    for name in ("symbols", "draft")
)

CONTRACT: Final = (
    *_LISTED,
    *(Symbol(path, (), members(seam), "members that are read or written") for seam, path in SEAMS.items()),
)

BODIES: Final = tuple(symbol.path for symbol in _LISTED)
"""What the table of digests has for every server."""

DRAFT_BODIES: Final = tuple(symbol.path for symbol in DRAFT)
"""What it has for servers with a draft model; `DRAFT` is what only those rely on."""

ATTENTION_BODIES: Final[dict[str, tuple[str, ...]]] = {
    name: tuple(paths) for name, paths in _TABLE["attention"].items()
}
"""By attention backend, what it was admitted for: how its tables are built, and that rows are written before any is
read. No code of ours uses these names, so they are no part of the contract; their digests are kept."""


def check_contract(contract: tuple[Symbol, ...] = CONTRACT) -> list[str]:
    """Check every symbol against the installed SGLang.

    Returns:
        Those of `BODIES` that are not what was tested, whatever they are called and hold.

    Raises:
        ContractError: one line that names the first symbol that is missing or changed, and the versions.
    """
    return _check(contract, BODIES)


def check_draft() -> list[str]:
    """As `check_contract`, of what only servers with a draft model rely on: those of `DRAFT_BODIES` that are not what
    was tested."""
    return _check(DRAFT, DRAFT_BODIES)


def _check(contract: Sequence[Symbol], tested: Sequence[str]) -> list[str]:
    try:
        for symbol in contract:
            problem = _problem(symbol)
            if problem:
                raise ContractError(
                    f"{symbol.path} {problem} in the installed SGLang {installed_version()}; sglang_pic was built for "
                    f"{BUILT_FOR} and needs it for {symbol.why}. Install "
                    f"sglang=={BUILT_FOR}, or start without --radix-cache-backend pic."
                )
        return bodies.changed_bodies(tested)
    finally:
        # Syntax trees of SGLang's largest files: needed once, and every process of a server would keep them.
        source.forget()


def changed_attention(backend: str) -> list[str]:
    """The functions of an attention backend that are not what was tested; none where none was."""
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
        f"SGLang {installed_version()} is not what was tested: {counted} that the cache relies on, other than in "
        f"{tested}: {names}. Start-up checks the live model all the same; to have what was "
        f"tested install sglang=={BUILT_FOR}."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the digests of the installed SGLang into the table of tested bodies."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_pic.adapter.contract",
        description="Writes the digests of the installed SGLang into the table of tested bodies. Run the tests first.",
    )
    parser.parse_args(argv)
    check_contract()
    paths = (*BODIES, *DRAFT_BODIES, *(path for functions in ATTENTION_BODIES.values() for path in functions))
    count = bodies.add_version(paths, installed_version())
    print(f"{bodies.TABLE}: {count} digests of SGLang {installed_version()}", file=sys.stderr)
    return 0


def _problem(symbol: Symbol) -> str | None:
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


def _holds(source_text: str, word: str) -> bool:
    # A name must be a whole word; any other text is looked for as it is.
    return re.search(rf"\b{word}\b", source_text) is not None if word.isidentifier() else word in source_text


@functools.cache
def installed_version() -> str:
    """The version of the installed SGLang; read once, as a package's metadata are files."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    raise SystemExit(main())
