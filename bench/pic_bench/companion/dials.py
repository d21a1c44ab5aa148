"""What a setting gives up and gains, at every value that a record has: `dials.toml` says where each figure stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pic_bench.report.columns import JINJA
from pic_bench.report.stats import Estimate
from pic_bench.report.study import rows_of

JINJA.filters["by_setting"] = lambda found: [
    {"set": name, "setting": setting, **counts} for name, all_ in found.items() for setting, counts in all_.items()
]


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a setting. What was not measured is None."""

    label: str
    n: int
    """Prompts, or sessions, behind the loss."""
    spliced: float
    loss: Estimate | None
    same_first: Estimate | None
    recovery: Estimate | None


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One set of prompts under every value.

    Args:
        of: what the spliced share is of.
        measure: what the loss is, in nats.
        unit: what `n` counts.
    """

    title: str
    record: str
    of: str
    measure: str
    unit: str
    stops: list[Stop]


class Dial(msgspec.Struct, frozen=True, kw_only=True):
    """A setting, with every series that has several of its values."""

    name: str
    series: list[Series]


def read_dials() -> list[Dial]:
    """Every setting, in the order of the file.

    Raises:
        KeyError: a record lacks what the file names.
    """
    listed = msgspec.toml.decode(
        Path(__file__).with_name("dials.toml").read_bytes(), type=dict[str, list[dict[str, Any]]]
    )
    return [
        Dial(name=name, series=[series for wanted in all_wanted for series in _series(wanted)])
        for name, all_wanted in listed.items()
    ]


def _series(wanted: dict[str, Any]) -> list[Series]:
    """A series for each group of rows, its stops in the order of `stops`."""
    labels: dict[str, str] = wanted["stops"]
    figures = {name: JINJA.compile_expression(wanted.get(name, "none")) for name in Stop.__struct_fields__[1:]}
    found = []
    for record, title in wanted["records"].items():
        for first in rows_of({**wanted, "records": {record: title}}):
            rows = {row[wanted["stop"]]: row for row in first["group"]}
            stops = [
                msgspec.convert({"label": label, **{name: read(rows[key]) for name, read in figures.items()}}, Stop)
                for key, label in labels.items()
                if key in rows
            ]
            words = {name: wanted.get(name, "") for name in ("of", "measure", "unit")}
            words["title"] = JINJA.from_string(wanted.get("title", "{{ title }}")).render(first)
            found.append(Series(record=record, stops=stops, **words))
    return found
