"""Notes in CHANGELOG.md what the unreleased state was tested with: `make tested`, for each version of SGLang.

Reads pytest's report in JUnit's form and writes one row of the table `Tested with`, in place of an older row of the
same versions.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parent.parent / "CHANGELOG.md"
_TABLE = re.compile(r"(?s:## \[Unreleased\]\n.*?### Tested with\n.*?\n\| ---).*\n((?:\|.*\n)*)")


def main() -> int:
    """Write the row; exit with 1 where the report has failures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sglang", help="the version of SGLang that the tests ran with")
    parser.add_argument("report", type=Path, help="what `pytest --junit-xml` wrote")
    args = parser.parse_args()
    cases = list(ET.parse(args.report).getroot().iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    python = ".".join(platform.python_version_tuple()[:2])
    row = row_of(args.sglang, python, (len(cases) - len(bad) - skipped, len(bad), skipped))
    CHANGELOG.write_text(with_row(CHANGELOG.read_text("utf8"), row), "utf8")
    print(row, *(f"failed: {case.get('classname')}::{case.get('name')}" for case in bad), sep="\n")
    return int(bool(bad) or not cases)


def row_of(sglang: str, python: str, counts: tuple[int, int, int]) -> str:
    """The row of one run; `counts` are the tests that passed, failed and were skipped."""
    return f"| {sglang} | {python} | {' | '.join(map(str, counts))} | {datetime.now(UTC).date().isoformat()} |"


def with_row(changelog: str, row: str) -> str:
    """The changelog with the row, newest SGLang first.

    Raises:
        ValueError: the unreleased section has no table `Tested with`.
    """
    found = _TABLE.search(changelog)
    if found is None:
        raise ValueError("CHANGELOG.md: [Unreleased] has no table `Tested with`")
    same = "|".join(row.split("|")[:3])
    rows = [row, *(line for line in found[1].splitlines() if not line.startswith(f"{same}|"))]
    rows.sort(key=lambda line: [int(part) for part in re.findall(r"\d+", line.split("|")[1])], reverse=True)
    return changelog[: found.start(1)] + "\n".join(rows) + "\n" + changelog[found.end(1) :]


if __name__ == "__main__":
    sys.exit(main())
