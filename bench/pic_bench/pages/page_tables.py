"""Pages with tables that code writes: one begins at `<!-- generated: NAME -->` and ends at `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

_BLOCK: Final = re.compile(r"(?<=<!-- generated: )([a-z0-9-]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def fill_in(page: str, written: Callable[[str], str]) -> str:
    """The page with its tables written anew; `written` gives a table's lines by its name."""
    return _BLOCK.sub(lambda found: f"{found[1]}{found[2]}{written(found[1])}", page)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The lines of a Markdown table; columns whose title ends in a colon are aligned to the right."""
    rules = ["---:" if title.endswith(":") else "---" for title in header]
    lines = ([title.removesuffix(":") for title in header], rules, *rows)
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
