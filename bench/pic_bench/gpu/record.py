"""The items and figures of `make gpu`, the record of an item on disk, and the tables of all records.

Imports no torch, so that the page of results can be written anywhere.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from pic_bench.environment import Environment
from pic_bench.out_folder import read_json
from pic_bench.report.markdown import Table, markdown_table
from sglang_pic.output import write_whole

# Seconds: of an item beside the starts of its servers, of a start with compiled kernels, of a start without.
_LIMIT_S, _START_S, COLD_START_S = 480.0, 240.0, 900.0


class Figure(NamedTuple):
    """One number that only a GPU can give, under a name that is a key of its item's `Found.figures`."""

    name: str
    item: str
    what: str
    form: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def aim(self) -> str:
        """In words; empty where the number is only to be known."""
        if self.at_least is not None:
            return f"at least {self.form.format(self.at_least)}"
        return "" if self.at_most is None else f"at most {self.form.format(self.at_most)}"

    def shown(self, value: float | None) -> str:
        """A value beside its aim; NaN never meets one."""
        if value is None:
            return "open"
        if not self.aim:
            return self.form.format(value)
        is_met = (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)
        return f"{self.form.format(value)}, {'met' if is_met else 'missed'}"


class Item(NamedTuple):
    """One step of the day, as items.toml has it; a failure of one does not stop the next."""

    name: str
    what: str
    work: str
    servers: int = 0
    """Servers that it starts, one after the other; with any it needs SGLang."""
    is_warmed: bool = False
    """Whether `warm` has compiled all that its servers need."""
    not_on_a_cpu: str = ""
    """Its parts that a dry run leaves out, beside `left_out`."""

    def limits_s(self, *, is_warm: bool) -> tuple[float, float]:
        """Seconds that it may take, and of these a start of a server, where `warm` has run and where not."""
        start_s = _START_S if is_warm and self.is_warmed else COLD_START_S
        return _LIMIT_S + self.servers * start_s, start_s

    @property
    def left_out(self) -> str:
        """The parts that a dry run leaves out."""
        ours = "SGLang's kernels, captured graphs" if self.servers else "compiled kernels"
        return ", ".join(filter(None, (f"{ours} (PyTorch or Triton's interpreter computes)", self.not_on_a_cpu)))


_TABLE: Final = tomllib.loads(Path(__file__).with_name("items.toml").read_text("utf8"))["item"]
ITEMS: Final = tuple(Item(**{name: each[name] for name in each if name != "figures"}) for each in _TABLE)
FIGURES: Final = tuple(Figure(item=each["name"], **one) for each in _TABLE for one in each.get("figures", ()))
MARKS: Final = ("<!-- gpu: begin -->", "<!-- gpu: end -->")  # around the table of the page


class Found(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of an item's work."""

    figures: dict[str, float] = {}
    notes: list[str] = []
    """The parts that were left out, and why."""
    failures: list[str] = []
    """The errors; a part with an error is not timed."""
    raw: dict[str, Any] = {}
    """Everything measured, as JSON."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One item, as it is written to `NN-NAME.json`."""

    schema_version: int = 1
    item: str
    status: str
    """`ok`, `failed`, `left out`, `stopped` at the time limit, or `died`."""
    is_dry: bool
    """Tiny sizes on a CPU: the numbers mean nothing."""
    wall_s: float
    environment: Environment
    found: Found


class Work(NamedTuple):
    """The arguments of an item's work."""

    is_dry: bool
    folder: Path
    """For logs, models and whatever else it writes."""
    start_s: float = COLD_START_S
    """Seconds that the start of a server may take."""
    model: str | None = None
    """A model folder for the 8B items, in place of dummy weights."""

    @property
    def device(self) -> str:
        """Where to run, as torch names it."""
        return "cpu" if self.is_dry else "cuda"


def file_name(item: str) -> str:
    """The name of an item's record; numbers keep a listing in order."""
    (number,) = (number for number, each in enumerate(ITEMS, 1) if each.name == item)
    return f"{number:02}-{item}.json"


def read_records(folder: Path) -> dict[str, Record]:
    """The records in a folder, by item.

    Raises:
        BenchError: a file is no record.
    """
    paths = {item.name: folder / file_name(item.name) for item in ITEMS}
    return {name: read_json(path, Record, "a record of `make gpu`") for name, path in paths.items() if path.exists()}


def item_table(records: Mapping[str, Record]) -> Table:
    """The status of every item."""
    rows = []
    for item in ITEMS:
        row = [item.name, "not run", "", ""]
        if record := records.get(item.name):
            said = [*record.found.failures, *record.found.notes, ""][0].partition("\n")[0]
            row[1:] = record.status, f"{record.wall_s:.0f}", said[:100]
        rows.append(row)
    return Table(["item", "status", "s", "first of what it says"], rows)


def figure_table(records: Mapping[str, Record]) -> Table:
    """Every figure that needs a GPU: its item, its aim and its value. Dry runs fill nothing."""
    rows = [[figure.what, figure.item, figure.aim, _measured(figure, records)] for figure in FIGURES]
    return Table(["figure", "item", "aim", "measured"], rows)


def _measured(figure: Figure, records: Mapping[str, Record]) -> str:
    record = records.get(figure.item)
    return figure.shown(None if record is None or record.is_dry else record.found.figures.get(figure.name))


def show(folder: Path, names: Sequence[str]) -> int:
    """Print the tables of the records in a folder and write them there; 1 where one of `names` failed."""
    records = read_records(folder)
    tables = [markdown_table(item_table(records)), markdown_table(figure_table(records))]
    text = "\n\n".join(tables)
    if any(record.is_dry for record in records.values()):
        text += "\n\nA dry run fills nothing: its sizes are tiny and its numbers mean nothing."
    write_whole(folder / "table.md", f"{text}\n".encode())
    print(f"\n{text}")
    left = sum(1 for figure in FIGURES if figure.item not in records or records[figure.item].is_dry)
    print(f"\n{len(FIGURES) - left} of {len(FIGURES)} figures' items have run on a card; records in {folder}")
    return 1 if any(name not in records or records[name].status not in ("ok", "left out") for name in names) else 0


def render(page: str, records: Mapping[str, Record]) -> str:
    """The page with its list of figures written anew, a line for each item."""
    lines = []
    for item in ITEMS:
        figures = [figure for figure in FIGURES if figure.item == item.name]
        named = [f"{figure.what}{f' ({figure.aim})' if figure.aim else ''}" for figure in figures]
        if item.name in records:
            named = [f"{name}: {_measured(figure, records)}" for name, figure in zip(named, figures, strict=True)]
        is_open = "" if item.name in records else "open: "
        lines += [f"- `{item.name}`: {is_open}{'; '.join(named)}"] if named else []
    before, begin, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    return "\n".join([f"{before}{begin}", *lines, f"{end}{after}"])
