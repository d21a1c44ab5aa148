"""Fills the tables of the study's pages from the records in bench/results: `python -m pic_bench.report.study`.

A table begins at `<!-- generated: NAME -->` and ends at `<!-- end -->`; the text around the tables stands in the pages.
What a table shows is in `tables.toml` beside the pages; the three tables that set cells of one record side by side are
here. Records are read as plain JSON, so that a page can show a record of any age.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from jinja2 import Environment, StrictUndefined

from pic_bench.report.markdown import Table, markdown_table
from pic_bench.report.numbers import count, divergence, percent, points, score, times

RESULTS: Final = Path(__file__).resolve().parents[2] / "results"
PAGES: Final = RESULTS / "study"
_BLOCK: Final = re.compile(r"(?<=<!-- generated: )([a-z0-9-]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
_LISTED: Final = tomllib.loads((PAGES / "tables.toml").read_text("utf8"))
_JINJA: Final = Environment(undefined=StrictUndefined)

Json = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables of all pages anew."""
    parser = argparse.ArgumentParser(prog="python -m pic_bench.report.study", description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(render(page.read_text(encoding="utf8")), encoding="utf8")
        print(page, file=sys.stderr)
    return 0


def render(page: str) -> str:
    """The page with the tables that the records give.

    Raises:
        KeyError: the page names a table that there is no code for.
    """
    return _BLOCK.sub(lambda found: f"{found[1]}{found[2]}\n{markdown_table(TABLES[found[1]]())}\n", page)


def _read(name: str) -> Any:
    content = (RESULTS / name).read_bytes()
    return json.loads(gzip.decompress(content) if name.endswith(".gz") else content)


def _listed(name: str) -> Table:
    """A table of tables.toml."""
    wanted = _LISTED["tables"][name]
    cells = [_JINJA.from_string(cell) for cell in wanted["columns"].values()]
    rows = [[cell.render(row) for cell in cells] for row in _rows(wanted)]
    # A blank at the end tells a title from the same one before it.
    return Table([title.rstrip() for title in wanted["columns"]], rows)


def _rows(wanted: Json) -> Iterator[Json]:
    """The records' rows that a table shows, each with the title of its record."""
    records = wanted["records"]
    if isinstance(records, str):
        records = _LISTED["records"].get(records, [records])
    titles = records if isinstance(records, dict) else dict.fromkeys(records)
    rows = _JINJA.compile_expression(wanted["rows"]) if "rows" in wanted else lambda record: [record]
    is_shown = _JINJA.compile_expression(wanted.get("where", "true"))
    for path, title in titles.items():
        yield from ({"title": title, **row} for row in rows(_read(path)) or () if is_shown(row))


def _interval(estimate: Json, write: str) -> str:
    low, value, high = (_JINJA.filters[write](estimate[name]) for name in ("low", "value", "high"))
    return f"{value} ({low} to {high})"


def _speedup(bucket: Json) -> str:
    return f"{times(bucket['ttft_speedup_p50'])} ({bucket['requests']})" if bucket["requests"] else "-"


def _same_tokens(answers: Sequence[Json], others: Sequence[Json]) -> int:
    return sum(a["tokens"] == b["tokens"] for a, b in zip(answers, others, strict=True))


def _tokens_a_pass(answers: Sequence[Json]) -> float:
    return sum(len(one["tokens"]) - 1 for one in answers) / sum(one["num_verified"] for one in answers)


_JINJA.filters |= {
    **{write.__name__: write for write in (count, divergence, percent, points, score, times)},
    "hundredths": "{:.2f}".format,
    "interval": _interval,
    "mean": fmean,
    "same_tokens": _same_tokens,
    "speedup": _speedup,
    "thousands": "{:,.0f}".format,
    "tokens_a_pass": _tokens_a_pass,
}


def _cells(folder: str, **wanted: object) -> list[Json]:
    """The cells of a fidelity run whose fields are as wanted."""
    cells = _read(f"{folder}/summary.json")["cells"]
    return [cell for cell in cells if all(cell[name] == value for name, value in wanted.items())]


def _grid() -> Table:
    rows = []
    for donors, title in (("isolated", "alone"), ("context", "in context")):
        for arm in ("naive", "seam-0", "seam-1", "seam-32"):
            cells = sorted(
                _cells("fidelity-grid", dtype="float32", donors=donors, arm=arm), key=lambda c: c["num_blocks"]
            )
            found = [f"{divergence(c['kl']['value'])} / {percent(c['top1']['value'], 0)}" for c in cells]
            rows.append([title, arm.replace("-", " "), *found])
    return Table(["donors", "arm", "1 run", "2", "4", "8", "16"], rows)


def _questions() -> Table:
    rows = []
    for source, title in (("kv_retrieval_75", "key-value"), ("musique_hipporag", "MuSiQue")):
        for arm in ("full", "default", "seam-32", "seam-1", "naive"):
            cells = _cells("fidelity-qa", source=source, arm=arm)
            spliced = percent(cells[0]["chunk_hit_tokens"] / cells[0]["prompt_tokens"], 0)
            right = " / ".join(f"{round(cell['n'] * cell['score']['value'])}" for cell in cells)
            kl = " / ".join(divergence(cell["kl"]["value"]) for cell in cells)
            same = " / ".join(percent(cell["top1"]["value"], 0) for cell in cells)
            rows.append([f"{title}, {arm}", spliced, right if title == "key-value" else "-", kl, same])
    return Table(["float32 / bf16", "spliced", "right, of 30", "KL", "same first token"], rows)


def _compose() -> Table:
    cells = {(c["num_blocks"], c["donors"], c["arm"]): c for c in _cells("fidelity-compose")}
    columns = [(donors, f"seam-{seam}") for donors in ("isolated", "context") for seam in (0, 1, 32)]
    rows = []
    for number in sorted({number for number, *_ in cells}):
        found = [cells.get((number, *column)) for column in columns]
        rows.append([str(number), *("-" if cell is None else divergence(cell["kl"]["value"]) for cell in found)])
    return Table(["skills", "alone, seam 0", "1", "32", "together, seam 0", "1", "32"], rows)


TABLES: Final[Mapping[str, Callable[[], Table]]] = {
    **{name: partial(_listed, name) for name in _LISTED["tables"]},
    "grid": _grid,
    "questions": _questions,
    "compose": _compose,
}


if __name__ == "__main__":
    sys.exit(main())
