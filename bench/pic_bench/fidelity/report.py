"""Writes a fidelity run's report from its raw records: summary.json, report.md and report.html."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import asdict

from pic_bench.environment import read_environment
from pic_bench.fidelity.compared import COMPETENT, DECIDED, DEFAULT, Panel, make_cells, make_panels
from pic_bench.fidelity.config import PROBES, read_probes
from pic_bench.fidelity.record import SURE, Probe
from pic_bench.fidelity.summary import Cell, Contrast, Summary
from pic_bench.out_folder import CONFIG, ENVIRONMENT, read_json
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import JINJA, table_of
from pic_bench.report.page import render_text, write_pages
from sglang_pic.errors import BenchError

NUM_WORST: Final = 8
FEW: Final = 20
"""With fewer calls, or sessions, percentile intervals are too narrow to conclude anything."""
MIN_CHUNK_HIT: Final = 256
"""Of a run that does not say which calls reuse much."""
_UNDECIDED: Final = "†"
_NAMES: Final = {
    "full": "full prefill",
    "retest": "full prefill again",
    "exact": "exact hit (noise floor)",
    "naive": "naive (not rotated)",
}
_COLUMNS: Final = tomllib.loads(Path(__file__).with_name("columns.toml").read_text("utf8"))


def write_report(folder: Path) -> Summary:
    """Write the report into a run's folder and return what it shows.

    Raises:
        BenchError: the folder has no records, or a file in it cannot be read.
    """
    summary = _summarize(folder)
    # The calls that reuse much come first: of the others most are alike under every policy.
    cells = sorted(summary.cells, key=lambda cell: -cell.min_chunk_hit)
    unpaired = [cell.against_floor.unpaired for cell in cells if cell.against_floor and cell.against_floor.unpaired]
    policies = summary.config.get("policies", "")
    write_pages(
        folder,
        summary,
        "fidelity.md.j2",
        f"Fidelity of {summary.model}",
        tables={where: cell_table(some) for where, some in groupby(cells, _where)},
        environment=summary.environment,
        first_policy=policies.split(",")[0].partition("=")[0],
        arm_name=arm_name,
        mark=_UNDECIDED,
        decided=DECIDED,
        competent=COMPETENT,
        few=FEW,
        sure=SURE,
        unpaired=unpaired,
        marked=sum(cell.undecided for cell in cells),
        smallest=min(cell.n for cell in cells),
        sessions=min(cell.num_units for cell in cells),
    )
    return summary


def headline(folder: Path) -> str:
    """The cells of a report that say most, as a person reads them in a terminal."""
    summary = read_json(folder / "summary.json", Summary, "of a fidelity run")
    return render_text("fidelity_overview.md.j2", summary=summary, table=_telling(summary.cells), mark=_UNDECIDED)


def cell_table(cells: Iterable[Cell]) -> Table:
    """All figures of every cell."""
    return _measured(table_of(_COLUMNS["cells"], map(_row, cells)))


def arm_name(arm: str) -> str:
    """An arm as the head of its row."""
    return _NAMES.get(arm, arm)


def _telling(cells: Sequence[Cell]) -> Table:
    """Of every trace the floor and the arms, over the calls that reuse much."""
    shown = []
    for cell in cells:
        most = max(c.min_chunk_hit for c in cells if (c.dtype, c.source) == (cell.dtype, cell.source))
        if cell.min_chunk_hit == most and cell.arm not in ("full", "retest"):
            shown.append(cell)
    return _measured(table_of(_COLUMNS["telling"], map(_row, shown)))


def _summarize(folder: Path) -> Summary:
    """All figures of a run's records; the same records in the same order give the same figures."""
    probes = read_probes(folder)
    if not probes:
        raise BenchError(f"{folder / PROBES}: no whole record; nothing was measured.")
    settings = read_json(folder / CONFIG, dict[str, object], "a run's settings") if (folder / CONFIG).exists() else {}
    config = {name: text for name, value in settings.items() if (text := _as_text(value)) not in ("", "null")}
    least = config.get("min_chunk_hit", "")
    min_chunk_hit = int(least) if least.isdecimal() else MIN_CHUNK_HIT
    panels, repeated = make_panels(probes, min_chunk_hit)
    return Summary(
        model=Path(config.get("model", "")).name or "an unnamed model",
        probes=len(probes),
        repeated=repeated,
        min_chunk_hit=min_chunk_hit,
        config=config,
        environment=read_environment(folder) if (folder / ENVIRONMENT).exists() else None,
        cells=make_cells(panels),
        worst=_worst(panels),
    )


def _worst(panels: Sequence[Panel]) -> list[Probe]:
    """The highest KL under the default policy, each call once."""
    spliced = [probe for panel in panels for probe in panel.arms.get(DEFAULT, {}).values()]
    highest: dict[tuple[str, str], Probe] = {}
    for probe in sorted(spliced, key=lambda probe: -probe.kl):
        highest.setdefault((probe.source, probe.prompt), probe)
    return list(highest.values())[:NUM_WORST]


def _where(cell: Cell) -> str:
    """The number format, the data and the choice of calls that a cell is of."""
    least = f"calls with {cell.min_chunk_hit} or more spliced tokens" if cell.min_chunk_hit else None
    return ", ".join(filter(None, (cell.dtype, cell.source, least)))


def _row(cell: Cell) -> Mapping[str, object]:
    floor = asdict(cell.against_floor) if cell.against_floor else dict.fromkeys(Contrast.__struct_fields__)
    return {**asdict(cell), "floor": floor, "where": _where(cell), "mark": _UNDECIDED}


def _measured(table: Table) -> Table:
    """The table without the columns in which nothing stands; its first column stays."""
    kept = [i for i, _ in enumerate(table.header) if i == 0 or any(row[i] not in ("-", "") for row in table.rows)]
    return Table([table.header[i] for i in kept], [[row[i] for i in kept] for row in table.rows])


def _as_text(value: object) -> str:
    """A string as it is, a list of strings with commas, anything else as JSON on one line, without its quotes."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode().replace('"', "")


JINJA.filters["arm_name"] = arm_name
