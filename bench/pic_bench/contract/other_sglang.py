"""Checks the contract against an SGLang that is not installed: a wheel, or a folder with its source.

`python -m pic_bench.contract.other_sglang WHEEL_OR_DIR`; nothing of it is imported.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sglang_pic.adapter.sglang import bodies, contract, source
from sglang_pic.adapter.sglang.contract import ATTENTION_BODIES, BODIES, BUILT_FOR, CONTRACT, FEATURES, HTTP, Symbol
from sglang_pic.errors import ConfigError

EVERY: Final = ("every server", "servers with an HTTP server")
UNTESTED: Final = "has an untested body"
"""Of a function with which servers start: the checks of the live model judge it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the differences, by the servers that need what differs; 0 if a server without further features would
    start."""
    parser = argparse.ArgumentParser(
        prog="python -m pic_bench.contract.other_sglang", description="Checks the contract against another SGLang."
    )
    help_ = "a wheel (`pip download --no-deps`), or a folder with SGLang's source"
    parser.add_argument("sglang", metavar="WHEEL_OR_DIR", help=help_)
    place = parser.parse_args(argv).sglang
    try:
        with unpacked(place) as package, source.reading(package):
            found, version = differences(), _version(package)
    except ConfigError as error:
        parser.error(str(error))
    print(f"SGLang {version} in {place}")
    for needed_by, lines in found.items():
        print(f"  {needed_by}:", *(f"    {path} {what}" for path, what in lines.items()), sep="\n")
    lost = [needed_by for needed_by, lines in found.items() if {*lines.values()} != {UNTESTED}]
    if any(needed_by in EVERY for needed_by in lost):
        print(f"would not start; sglang_pic was built for SGLang {BUILT_FOR}")
        return 1
    without = f", but not {'; '.join(lost)}" if lost else ""
    print(f"would start{without}; start-up checks the live model")
    return 0


def differences() -> dict[str, dict[str, str]]:
    """What differs from the contract in the SGLang that is read, by the servers that need it and by path."""
    found: dict[str, dict[str, str]] = {}
    for symbol, needed_by in _contract():
        what = contract.problem_of(symbol)
        if what is None and (symbol.path in BODIES or not symbol.why) and bodies.changed_bodies([symbol.path]):
            what = UNTESTED
        if what is not None:
            found.setdefault(needed_by, {})[symbol.path] = what
    return found


def _contract() -> Iterator[tuple[Symbol, str]]:
    """Every line, and the servers that need it; a symbol has a line for each kind of server."""
    for symbols, needed_by in zip((CONTRACT, HTTP), EVERY, strict=True):
        yield from ((symbol, needed_by) for symbol in symbols)
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
    for what, row in (entry for areas in matrix.values() for entries in areas.values() for entry in entries.items()):
        if isinstance(row, dict) and "contract" in row:
            found.setdefault(row["contract"], []).append(what)
    return found


@contextmanager
def unpacked(place: str) -> Iterator[Path]:
    """The folder of the package; a wheel's modules are unpacked into a temporary one.

    Args:
        place: a wheel of SGLang, or a folder that has it: a repository, a site-packages folder or the package itself.

    Raises:
        ConfigError: it is neither.
    """
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
