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
    """A piece of code, and what fails without it."""

    invariant: int
    what: str
    """What the mutated code does."""
    file: str
    before: str
    """Stands exactly once in the file."""
    after: str
    test: str
    """As pytest takes it."""

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


def read_table() -> tuple[dict[int, str], list[Mutation]]:
    """The invariants in a few words, by number, and the mutations of the table."""
    table = tomllib.loads(TABLE.read_text("utf8"))
    invariants = {each["number"]: each["what"] for each in table["invariant"]}
    return invariants, [Mutation(**each) for each in table["mutation"]]


def render(page: str) -> str:
    """A page with the table of invariants, the code that keeps them and how many mutations remove it."""
    invariants, mutations = read_table()
    lines = ["| | invariant | kept in `adapter` (or as named) | mutations |", "|--:|---|---|--:|"]
    for number, what in invariants.items():
        mine = [mutation.file for mutation in mutations if mutation.invariant == number]
        files = dict.fromkeys(file.removeprefix("sglang_pic/").removeprefix("adapter/") for file in mine)
        kept = ", ".join(f"`{file.removesuffix('.py')}`" for file in files)
        lines.append(f"| {number} | {what[:1].upper()}{what[1:]} | {kept} | {len(mine)} |")
    return _BLOCK.sub("\n".join([*lines, ""]), page)
