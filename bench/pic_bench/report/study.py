"""Fills the tables of the study's pages from the records in bench/results, and draws its picture.

`python -m pic_bench.report.study`. The text around the tables stands in the pages. What a table shows is in
`tables.toml` beside the pages. Records are read as plain JSON, so that a page can show one of any age.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from pic_bench.pages.page_tables import fill_in
from pic_bench.report import frontier
from pic_bench.report.markdown import markdown_table
from pic_bench.report.numbers import JINJA, divergence, percent, table_of, times
from pic_bench.report.stats import most_lost

RESULTS: Final = Path(__file__).resolve().parents[2] / "results"
PAGES: Final = RESULTS / "study"
FRONTIER: Final = PAGES / "frontier.svg"
_LISTED: Final = tomllib.loads((PAGES / "tables.toml").read_text("utf8"))
TABLES: Final[Mapping[str, Any]] = _LISTED["tables"]
"""The records and columns of every table, by its name on a page."""
_PLAIN: Final = {"rows": "[record]", "where": "true", "by": "number", "order": "0"}
"""A table's rules where tables.toml gives none: the record is a row, each row a group, in the record's order."""

Json = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables of all pages anew, and the picture."""
    parser = argparse.ArgumentParser(prog="python -m pic_bench.report.study", description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(render(page.read_text(encoding="utf8")), encoding="utf8")
        print(page, file=sys.stderr)
    FRONTIER.write_text(frontier.picture(frontier.read(RESULTS)), encoding="utf8")
    return 0


def render(page: str) -> str:
    """The page with the tables that the records give.

    Raises:
        KeyError: the page names a table that tables.toml lacks.
    """

    def written(name: str) -> str:
        wanted = TABLES[name]
        return f"\n{markdown_table(table_of(wanted['columns'], rows_of(wanted)))}\n"

    return fill_in(page, written)


def rows_of(wanted: Json) -> Iterator[Json]:
    """What a table shows in a row each: of every record the rows, or groups of them, with the record's title.

    A group has the fields of its first row, and all its rows as `group`.
    """
    records = wanted["records"]
    if isinstance(records, str):
        records = _LISTED["records"].get(records, [records])
    titles = records if isinstance(records, dict) else dict.fromkeys(records)
    rules = (wanted.get(part, plain) for part, plain in _PLAIN.items())
    rows, where, by, order = (JINJA.compile_expression(rule, undefined_to_none=False) for rule in rules)
    for path, title in titles.items():
        content = (RESULTS / path).read_bytes()
        record = json.loads(gzip.decompress(content) if path.endswith(".gz") else content)
        groups: dict[str, list[Json]] = {}
        for number, row in enumerate(rows(record, record=record) or ()):
            if where(row):
                groups.setdefault(str(by(row, number=number)), []).append(row)
        for group in sorted(groups.values(), key=lambda group: str(order(group[0]))):
            yield {**group[0], "title": title, "group": group}


def _interval(estimate: Json, write: str) -> str:
    low, value, high = (JINJA.filters[write](estimate[name]) for name in ("low", "value", "high"))
    return f"{value} ({low} to {high})"


def _of_arm(cells: Sequence[Json], arm: str) -> Any:
    """The cell of an arm; None where the run has none."""
    return next((cell for cell in cells if cell["arm"] == arm), None)


def _reuse_and_loss(cells: Sequence[Json], arm: str) -> str:
    """Of an arm of TRACE: the share of the prefix cache's misses that is spliced, and the mean KL over 32 tokens."""
    cell = _of_arm(cells, arm)
    if cell is None:
        return "-"
    reuse = cell["chunk_hit_tokens"] / _of_arm(cells, "exact")["computed_tokens"]
    return f"{percent(reuse, 0)}: {divergence(cell['forced_kl']['value'])}"


def _paired(losses: Sequence[Json], arm: str) -> str:
    """Of an arm of the paired experiment: the share computed, the KL, and answers lost and won; and of
    how many prompts, where these are not all."""
    loss = _of_arm(losses, arm)
    if loss is None:
        return "-"
    changes = f", -{loss['lost']} +{loss['won']}" if loss["lost"] or loss["won"] else ""
    of = f" of {loss['prompts']}" if loss["prompts"] != losses[0]["prompts"] else ""
    return f"{loss['computed']:.0%}: {divergence(loss['kl'])}{changes}{of}"


def _most_lost(losses: Sequence[Json], arm: str) -> str:
    """The upper bound of the share of answers that an arm of the paired experiment loses: of all prompts, and of those
    that it splices in where the record counts them."""
    loss = _of_arm(losses, arm)
    if loss is None:
        return "-"
    of_all = percent(loss["most_lost"], 1)
    num = loss.get("spliced_in")
    return f"{of_all}; {percent(most_lost(loss['lost'], num), 1)} of {num}" if num else of_all


def _recovery(losses: Sequence[Json], arm: str) -> str:
    """Mean and 10th percentile of what an arm of the paired experiment recovers of the new answer."""
    return "{:.2f}, {:.2f}".format(*_of_arm(losses, arm)["recovery"])


def _kl_of(cells: Sequence[Json], donors: str, arm: str) -> str:
    found = [cell["kl"]["value"] for cell in cells if (cell["donors"], cell["arm"]) == (donors, arm)]
    return divergence(found[0]) if found else "-"


JINJA.filters |= {
    "hundredths": "{:.2f}".format,
    "interval": _interval,
    "kl_of": _kl_of,
    "mean": fmean,
    "most_lost": _most_lost,
    "num_right": lambda cell: round(cell["n"] * cell["score"]["value"]),
    "of_arm": _of_arm,
    "of_most": lambda arm, arms: percent(arm["spliced_tokens"] / arms["most"]["spliced_tokens"], 0),
    "paired": _paired,
    "recovery": _recovery,
    "reuse_and_loss": _reuse_and_loss,
    "same_tokens": lambda found, others: sum(a["tokens"] == b["tokens"] for a, b in zip(found, others, strict=True)),
    "speedup": lambda of: f"{times(of['ttft_speedup_p50'])} ({of['requests']})" if of["requests"] else "-",
    "tokens_a_pass": lambda found: sum(len(of["tokens"]) - 1 for of in found) / sum(of["num_verified"] for of in found),
}


if __name__ == "__main__":
    sys.exit(main())
