"""Checks the contract against an SGLang that is not installed: a wheel, or a folder with its source.

`python -m pic_bench.contract.other_sglang WHEEL_OR_DIR`.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from sglang_pic.adapter.sglang import bodies, contract, source
from sglang_pic.adapter.sglang.contract import (
    ATTENTION_BODIES,
    BODIES,
    BUILT_FOR,
    CONTRACT,
    FEATURES,
    HTTP,
    Symbol,
    problem_of,
)
from sglang_pic.errors import ConfigError

EVERY: Final = "every server"
_WITH_HTTP: Final = "servers with an HTTP server"


class State(Enum):
    """The state of a symbol in the other version, the worst last."""

    FOUND = "found"
    UNTESTED = "untested body"
    CHANGED = "changed"
    MOVED = "moved"
    MISSING = "missing"


class Line(NamedTuple):
    """One line of the contract."""

    path: str
    state: State
    detail: str
    """The difference in its signature or source; for a symbol that moved, its place."""
    needed_by: str
    """The servers that need it."""

    @property
    def holds(self) -> bool:
        """Whether servers that need it start: the checks of the live model judge another body."""
        return self.state in (State.FOUND, State.UNTESTED)


class OtherSGLang(NamedTuple):
    """The contract of an SGLang that is not installed."""

    source: str
    version: str
    lines: list[Line]

    @property
    def starts(self) -> bool:
        """Whether a server without further features would start."""
        return all(line.holds for line in self.lines if line.needed_by in (EVERY, _WITH_HTTP))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the differences, by the servers that need them, and the servers that would start; 0 if one without features
    would."""
    parser = argparse.ArgumentParser(
        prog="python -m pic_bench.contract.other_sglang", description="Checks the contract against another SGLang."
    )
    parser.add_argument(
        "sglang",
        metavar="WHEEL_OR_DIR",
        help="a wheel (`pip download --no-deps`), or a folder with SGLang's source",
    )
    try:
        found = check_other(parser.parse_args(argv).sglang)
    except ConfigError as error:
        parser.error(str(error))
    print(*_shown(found), sep="\n")
    return 0 if found.starts else 1


def check_other(place: str) -> OtherSGLang:
    """Check every line of the contract against a wheel or a folder; nothing of it is imported.

    Args:
        place: a wheel of SGLang, or a folder that has it: a repository, a site-packages folder or the package itself.

    Raises:
        ConfigError: it is neither.
    """
    with _unpacked(place) as package, source.reading(package):
        lines = [_line(symbol, needed_by, package) for symbol, needed_by in _contract()]
        return OtherSGLang(source=place, version=_version(package), lines=lines)


def _shown(found: OtherSGLang) -> Iterator[str]:
    yield f"SGLang {found.version} in {found.source}"
    for needed_by in dict.fromkeys(line.needed_by for line in found.lines):
        differ = [line for line in found.lines if line.needed_by == needed_by and line.state is not State.FOUND]
        if differ:
            yield f"  {needed_by}:"
            width = 1 + max(len(state.value) for state in State)
            yield from (f"    {line.state.value:<{width}}{line.path} {line.detail}".rstrip() for line in differ)
    counts = Counter(line.state for line in found.lines)
    counted = ", ".join(f"{counts[state]} {state.value}" for state in State if counts[state])
    yield f"{len(found.lines)} lines of the contract: {counted}"
    lost = dict.fromkeys(line.needed_by for line in found.lines if not line.holds)
    if not found.starts:
        yield f"would not start; sglang_pic was built for SGLang {BUILT_FOR}"
    elif lost:
        yield f"would start, but not {'; '.join(lost)}"
    else:
        yield "would start; start-up checks the live model on what no test ran with"


def _contract() -> Iterator[tuple[Symbol, str]]:
    """Every line, and the servers that need it; a symbol has a line for each kind of server."""
    yield from ((symbol, EVERY) for symbol in CONTRACT)
    yield from ((symbol, _WITH_HTTP) for symbol in HTTP)
    needing = _servers_of_tables()
    for table, symbols in FEATURES.items():
        # A table that no line of the matrix names has the name of its option.
        servers = " or ".join(needing.get(table, [f"`{table}`"]))
        yield from ((symbol, f"servers with {servers}") for symbol in symbols)
    for backend, paths in ATTENTION_BODIES.items():
        yield from ((Symbol(path), f"servers with the prefill attention backend {backend}") for path in paths)


def _servers_of_tables() -> dict[str, list[str]]:
    """What the matrix calls the servers that need each table of `FEATURES`; `support.py` itself would load torch."""
    found: dict[str, list[str]] = {}
    matrix = tomllib.loads(Path(contract.__file__).parent.with_name("support.toml").read_text(encoding="utf8"))
    for areas in matrix.values():
        for entries in areas.values():
            for what, row in entries.items():
                if isinstance(row, dict) and "contract" in row:
                    found.setdefault(row["contract"], []).append(what)
    return found


def _line(symbol: Symbol, needed_by: str, package: Path) -> Line:
    state, detail, problem = State.FOUND, "", problem_of(symbol)
    if problem is not None:
        state, detail = State.CHANGED, problem
        if source.find(symbol.path) is None:
            places = _places(symbol.path, package)
            state = State.MOVED if len(places) == 1 else State.MISSING
            detail = f"is {places[0]}" if state is State.MOVED else problem
    elif (symbol.path in BODIES or not symbol.why) and bodies.changed_bodies([symbol.path]):
        state = State.UNTESTED
    return Line(path=symbol.path, state=state, detail=detail, needed_by=needed_by)


def _places(path: str, package: Path) -> list[str]:
    """The paths at which a definition has the name that is missing at its own: a class with its member, or a function,
    or a method in any class if the class itself is where it was."""
    parts = path.split(".")
    first = next((number for number, part in enumerate(parts) if part[0].isupper()), len(parts) - 1)
    top, name = parts[first], parts[-1]
    tail = ".".join(parts[first:])
    if first < len(parts) - 1 and source.find(".".join(parts[: first + 1])) is not None:
        pattern = re.compile(rf"^class (\w+)|^    (?:async )?def {name}\b", re.MULTILINE)
        found = []
        for module, text in _modules(package, f"def {name}("):
            owner = ""
            for each in pattern.finditer(text):
                owner = each[1] or owner
                found += [] if each[1] else [f"{module}.{owner}.{name}"]
        return found
    defined = re.compile(rf"^(?:class|def|async def) {top}\b", re.MULTILINE)
    modules = (module for module, text in _modules(package, top) if defined.search(text))
    return [f"{module}.{tail}" for module in modules if source.find(f"{module}.{tail}") is not None]


def _modules(package: Path, text: str) -> Iterator[tuple[str, str]]:
    """The modules of a server that have a text."""
    for file in sorted((package / "srt").rglob("*.py")):
        if text in (source_text := file.read_text(encoding="utf8")):
            parts = file.relative_to(package).with_suffix("").parts
            yield ".".join(["sglang", *parts]).removesuffix(".__init__"), source_text


@contextmanager
def _unpacked(place: str) -> Iterator[Path]:
    """The folder of the package; a wheel's modules are unpacked into a temporary one."""
    path = Path(place).expanduser()
    with tempfile.TemporaryDirectory() as folder:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as wheel:
                names = [name for name in wheel.namelist() if name.startswith("sglang/") and name.endswith(".py")]
                wheel.extractall(folder, names)
            path = Path(folder)
        for package in (path, path / "sglang", path / "python" / "sglang"):
            if (package / "srt").is_dir():
                yield package
                return
    raise ConfigError(f"{place!r}: must be a wheel of SGLang, or a folder that has it in sglang/srt.")


def _version(package: Path) -> str:
    file = package / "_version.py"
    found = re.search(r"__version__ = .*'(.+)'", file.read_text(encoding="utf8")) if file.is_file() else None
    return "of an unknown version" if found is None else found[1]


if __name__ == "__main__":
    raise SystemExit(main())
