"""The tables of a fidelity report, as `tables.toml` describes them. Every row names its number of prompts."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import asdict

from pic_bench.fidelity.compared import GATED
from pic_bench.fidelity.summary import Cell, Contrast
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import JINJA, table_of

UNDECIDED = "†"
FLOOR_NAMES = {"exact": "exact hit (noise floor)", "retest": "full prefill again", "full": "full prefill"}
_TOML = tomllib.loads((Path(__file__).parent / "tables.toml").read_text("utf8"))
TITLES, CROSSED, COLUMNS = (_TOML[part] for part in ("titles", "crossed", "columns"))


class Titled(NamedTuple):
    """A table under a title; folded away where few will read it."""

    title: str
    table: Table
    folded: bool = False


def arm_name(arm: str) -> str:
    """An arm as the head of its row."""
    return FLOOR_NAMES.get(arm, "naive (not rotated)" if arm == "naive" else arm)


def cell_table(cells: Iterable[Cell]) -> Table:
    """All figures of every cell."""
    return _measured(table_of(COLUMNS["cells"], map(_row, cells)))


def crossed(cells: Sequence[Cell], figure: str) -> Table | None:
    """One figure of cells of one experiment, arms against groups, the more numerous in rows; None if not measured."""
    write = JINJA.from_string(CROSSED[figure])
    at = {(arm_name(cell.arm), group_name(cell.group)): cell for cell in cells if cell.arm != "full"}
    if not at:
        return None
    arms, groups = (list(dict.fromkeys(names)) for names in zip(*at, strict=True))
    head, down, across = "prompts →", arms, groups
    if len(groups) > len(arms):
        head, down, across = "prompts", groups, arms
        at = {(group, arm): cell for (arm, group), cell in at.items()}
    rows = []
    for name in down:
        found = [at.get((name, other)) for other in across]
        sizes = sorted({cell.n for cell in found if cell is not None})
        size = " to ".join(f"{n:,}" for n in dict.fromkeys((sizes[0], sizes[-1])))
        rows.append([name, size, *(write.render(_row(cell)) if cell is not None else "-" for cell in found)])
    return Table([head, "n", *across], rows) if any({*row[2:]} != {"-"} for row in rows) else None


def telling_table(cells: Sequence[Cell]) -> Table:
    """The cells that say most, for a terminal: of every experiment the floor and the arms, over most prompts."""
    shown = []
    for cell in cells:
        same = [c for c in cells if (c.experiment, c.dtype, c.source) == (cell.experiment, cell.dtype, cell.source)]
        if _size(cell) == max(map(_size, same)) and cell.arm not in ("full", "retest"):
            shown.append(cell)
    return _measured(table_of(COLUMNS["telling"], map(_row, shown)))


def where(cell: Cell) -> str:
    """The number format, the data and the choice of calls that a cell is of."""
    least = f"calls with {cell.min_chunk_hit} or more spliced tokens" if cell.min_chunk_hit else None
    return ", ".join(filter(None, (cell.dtype, cell.source, least)))


def group_name(group: str) -> str:
    """A group of prompts as the head of a column."""
    return group or "-"


def _row(cell: Cell) -> Mapping[str, object]:
    floor = asdict(cell.against_floor) if cell.against_floor else dict.fromkeys(Contrast.__struct_fields__)
    words = ", ".join(filter(None, (cell.experiment.value, where(cell), cell.group)))
    return {**asdict(cell), "floor": floor, "where": words, "mark": UNDECIDED}


def _size(cell: Cell) -> tuple[int, bool]:
    return cell.min_chunk_hit, cell.group == GATED


def _measured(table: Table) -> Table:
    """The table without the columns in which nothing stands; its first column stays."""
    kept = [i for i, _ in enumerate(table.header) if i == 0 or any(row[i] not in ("-", "") for row in table.rows)]
    return Table([table.header[i] for i in kept], [[row[i] for i in kept] for row in table.rows])


JINJA.filters |= {"arm_name": arm_name, "group_name": group_name}
