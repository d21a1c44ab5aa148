"""The code that keeps each invariant of the design, and the test that fails without it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("table.toml")
PAGE = ROOT / "sglang_pic" / "README.md"
_BLOCK = re.compile(r"(?<=<!-- invariants: begin -->\n).*?(?=<!-- invariants: end -->)", re.DOTALL)


class Mutation(NamedTuple):
    """A piece of code, and the test that fails without it."""

    invariant: int
    what: str
    """The effect of the mutated code."""
    file: str
    before: str
    """Exactly once in the file."""
    after: str
    test: str
    """Its id in pytest."""

    def apply(self, root: Path) -> str:
        """Mutate the file below a folder; its text before.

        Raises:
            ValueError: the code to mutate is not there exactly once.
        """
        path = root / self.file
        text = path.read_text("utf8")
        if (found := text.count(self.before)) != 1:
            raise ValueError(f"invariant {self.invariant}, {self.what!r}: {self.file} has {found} times: {self.before}")
        path.write_text(text.replace(self.before, self.after), "utf8")
        return text


class Invariant(NamedTuple):
    """A row of the page."""

    number: int
    what: str
    how: str
    """The mechanism, in one clause."""
    owner: str
    """The file that a reader opens first, below `sglang_pic`."""


def read_table() -> tuple[list[Invariant], list[Mutation]]:
    """The invariants, and the mutations of their code."""
    table = tomllib.loads(TABLE.read_text("utf8"))
    return [Invariant(**each) for each in table["invariant"]], [Mutation(**each) for each in table["mutation"]]


def render(page: str) -> str:
    """A page with the table of invariants."""
    invariants, mutations = read_table()
    lines = ["| | invariant | mechanism | owner | mutations |", "|--:|---|---|---|--:|"]
    for number, what, how, owner in invariants:
        count = sum(mutation.invariant == number for mutation in mutations)
        link = f"[{owner.rpartition('/')[2]}]({owner})"
        lines.append(f"| {number} | {what[:1].upper()}{what[1:]} | {how[:1].upper()}{how[1:]} | {link} | {count} |")
    return _BLOCK.sub("\n".join([*lines, ""]), page)
