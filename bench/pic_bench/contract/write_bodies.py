"""Writes the digests of the installed SGLang into `bodies.toml`: `python -m pic_bench.contract.write_bodies`.

Run the tests first (`make contract`): a digest says that a function was tested.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from sglang_pic.adapter.sglang import bodies
from sglang_pic.adapter.sglang.contract import (
    ATTENTION_BODIES,
    BODIES,
    FEATURES,
    check_contract,
    installed_version,
)
from sglang_pic.errors import ContractError

_HEADER: Final = """\
# Digests of the functions and classes of SGLang that contract.toml names, each with the versions that have it.
# Written by `make contract`; bodies.py compares them with the installed SGLang when a server starts.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the digests of the functions of the installed SGLang that a server relies on."""
    parser = argparse.ArgumentParser(prog="python -m pic_bench.contract.write_bodies", description=__doc__)
    parser.parse_args(argv)
    check_contract()
    lacking = set[str]()
    for name, symbols in FEATURES.items():
        try:
            check_contract(symbols, without=name)
        except ContractError as error:
            print(error, file=sys.stderr)
            lacking |= {symbol.path for symbol in symbols}
    paths = (*BODIES, *(path for functions in ATTENTION_BODIES.values() for path in functions))
    count = add_version(paths, installed_version(), lacking=lacking)
    print(f"{bodies.TABLE}: {count} digests of SGLang {installed_version()}", file=sys.stderr)
    return 0


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
        for known, versions in bodies.TESTED_BODIES.get(path, {}).items():
            digests[known] = [one for one in versions if one != version]
        found = None if path in lacking else bodies.digest_of(path)
        if found is not None:
            digests.setdefault(found, []).append(version)
    lines = [f'"{path}" = {{ {", ".join(_entries(digests))} }}\n' for path, digests in table.items()]
    bodies.TABLE.write_text(f"{_HEADER}\n{''.join(lines)}", encoding="utf8")
    return sum(version in versions for digests in table.values() for versions in digests.values())


def _entries(digests: Mapping[str, list[str]]) -> list[str]:
    return [f"{found} = {json.dumps(sorted(versions))}" for found, versions in digests.items() if versions]


if __name__ == "__main__":
    raise SystemExit(main())
