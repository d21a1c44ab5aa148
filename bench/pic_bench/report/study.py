"""Fills the tables of the study's pages from the records in bench/results: `python -m pic_bench.report.study`.

A table begins at `<!-- generated: NAME -->` and ends at `<!-- end -->`; the text around the tables stands in the pages.
Records are read as plain JSON, so that a page can show a record of any age.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from pic_bench.report.markdown import Table, markdown_table
from pic_bench.report.numbers import count, divergence, percent, times

RESULTS: Final = Path(__file__).resolve().parents[2] / "results"
PAGES: Final = RESULTS / "study"
_BLOCK: Final = re.compile(r"(?<=<!-- generated: )([a-z0-9-]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
_SETS: Final = {
    "demo/clock-sample-agents": "demo, behind a clock",
    "demo/sample-agents": "demo, as recorded",
    "demo-opendevin-sample": "OpenDevin sample",
    "opendevin-all-sessions": "OpenDevin",
    "chatdev-ten-sessions": "ChatDev",
}
_EARLIER: Final = {
    f"{settings}/{folder}": f"{_SETS[folder]}, {settings.replace('-', ' ')}"
    for folder in ("opendevin-all-sessions", "chatdev-ten-sessions")
    for settings in ("in-place", "most-reuse")
}

Json = Mapping[str, Any]
Rows = Iterable[Sequence[str]]


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
    return _BLOCK.sub(lambda found: f"{found[1]}{found[2]}\n{TABLES[found[1]]()}\n", page)


def _read(name: str) -> Any:
    content = (RESULTS / name).read_bytes()
    return json.loads(gzip.decompress(content) if name.endswith(".gz") else content)


def _table(header: str, rows: Rows) -> str:
    """A table under the titles of `header`, which stand between bars."""
    return markdown_table(Table(header.split(" | "), [list(row) for row in rows]))


def _interval(estimate: Json, write: Callable[[float], str] = divergence) -> str:
    return f"{write(estimate['value'])} ({write(estimate['low'])} to {write(estimate['high'])})"


def _near_one(value: float) -> str:
    return f"{value:.3f}"


def _signed_points(value: float) -> str:
    return f"{100 * value:+.1f}"


def _comparisons(folders: Mapping[str, str]) -> list[tuple[str, Json, Json, Json]]:
    """Title, comparison, baseline and patched arm of every folder."""
    summaries = [(title, _read(f"{folder}/summary.json")) for folder, title in folders.items()]
    return [
        (title, summary["paired"], *(summary["arms"][summary["paired"][role]] for role in ("baseline", "arm")))
        for title, summary in summaries
    ]


def _gain_tokens() -> str:
    rows = (
        [
            *(title, str(pair["requests"])),
            percent(stock["prefix_hit_tokens"] / stock["prompt_tokens"]),
            percent(patched["chunk_hit_tokens"] / patched["prompt_tokens"]),
            *(f"{arm['computed_tokens']:,}" for arm in (stock, patched)),
            percent(pair["computed_tokens_ratio"]),
        ]
        for title, pair, stock, patched in _comparisons(_SETS)
    )
    return _table("calls of | n | prefix hit | chunk hit | stock computes | patched computes | of stock's", rows)


def _gain_times() -> str:
    rows = []
    for title, pair, *_ in _comparisons(_SETS):
        nothing, over = pair["by_chunk_hit_tokens"][0], pair["at_least_chunk_hit_tokens"]
        speedups = [
            f"{times(b['ttft_speedup_p50'])} ({b['requests']})" if b["requests"] else "-" for b in (nothing, *over)
        ]
        kl = pair["first_token_kl"]
        same = [percent(pair["first_token_agreement"]), percent(pair["output_agreement"])]
        spread = f"{divergence(kl['p50'])} / {divergence(kl['p99'])}" if kl else "-"
        rows.append([title, times(pair["ttft_speedup_p50"]), *speedups, *same, spread])
    header = "calls of | TTFT, all | nothing spliced (n) | ≥ 256 (n) | ≥ 1,000 (n)"
    return _table(f"{header} | same first token | same answer | KL p50 / p99", rows)


def _earlier() -> str:
    rows = []
    for title, pair, *_ in _comparisons(_EARLIER):
        at_least_256 = pair["at_least_chunk_hit_tokens"][0]
        speedup = f"{times(at_least_256['ttft_speedup_p50'])} ({at_least_256['requests']})"
        same = percent(pair["first_token_agreement"])
        rows.append(
            [title, percent(pair["computed_tokens_ratio"]), speedup, same, divergence(pair["first_token_kl"]["p50"])]
        )
    return _table("calls of | computed, of stock's | TTFT, ≥ 256 spliced (n) | same first token | KL p50", rows)


def _lasting() -> str:
    runs = {"census": "six hours, simulated", "replay": "one hour, on a server"}
    runs["census-2-percent"] = "six hours, pool of a fiftieth"
    rows = []
    for name, title in runs.items():
        trend = _read(f"gain-lasts/{name}.json")["trends"]["recovered"]
        halves = [percent(trend[half]) for half in ("first_half", "second_half")]
        rows.append([title, *halves, *(_interval(trend[key], _signed_points) for key in ("change", "slope_per_hour"))])
    return _table("chunk hits, of the misses | first half | second half | change, points | points an hour", rows)


def _recall() -> str:
    rows = []
    for one in _read("recall.json")["sets"]:
        if one["name"].startswith(("gen:", "sample:")):
            continue
        prompt, repeated = one["prompt_tokens"], one["repeated_tokens"]
        found = percent(one["recovered_tokens"] / repeated)
        sizes = [f"{one['calls']:,}", count(prompt), percent(one["prefix_tokens"] / prompt), count(repeated), found]
        rows.append([f"`{one['name']}`", *sizes, f"{one['runs'] / one['calls']:.2f}"])
    return _table("set | calls | prompt tokens | prefix | repeats behind it | found of it | runs a call", rows)


def _cells(folder: str, **wanted: object) -> list[Json]:
    """The cells of a fidelity run whose fields are as wanted."""
    cells = _read(f"{folder}/summary.json")["cells"]
    return [cell for cell in cells if all(cell[name] == value for name, value in wanted.items())]


def _grid() -> str:
    rows = []
    for donors, title in (("isolated", "alone"), ("context", "in context")):
        for arm in ("naive", "seam-0", "seam-1", "seam-32"):
            cells = {c["num_blocks"]: c for c in _cells("fidelity-grid", dtype="float32", donors=donors, arm=arm)}
            found = [
                f"{divergence(c['kl']['value'])} / {percent(c['top1']['value'], 0)}" for _, c in sorted(cells.items())
            ]
            rows.append([title, arm.replace("-", " "), *found])
    return _table("donors | arm | 1 run | 2 | 4 | 8 | 16", rows)


def _trace_cells(folder: str, min_chunk_hit: int) -> str:
    rows = [
        [
            *(cell["dtype"], cell["arm"].replace("exact", "exact hits"), str(cell["n"]), _interval(cell["kl"])),
            *(divergence(cell["kl_median"]["value"]), _interval(cell["top1"], percent)),
        ]
        for cell in _cells(folder, min_chunk_hit=min_chunk_hit)
        if cell["arm"] not in ("full", "retest")
    ]
    return _table("dtype | setting | calls | KL, mean | median | same first token", rows)


def _questions() -> str:
    rows = []
    for source, title in (("kv_retrieval_75", "key-value"), ("musique_hipporag", "MuSiQue")):
        for arm in ("full", "default", "seam-32", "seam-1", "naive"):
            cells = _cells("fidelity-qa", source=source, arm=arm)
            spliced = percent(cells[0]["chunk_hit_tokens"] / cells[0]["prompt_tokens"], 0)
            right = " / ".join(f"{round(cell['n'] * cell['score']['value'])}" for cell in cells)
            kl = " / ".join(divergence(cell["kl"]["value"]) for cell in cells)
            same = " / ".join(percent(cell["top1"]["value"], 0) for cell in cells)
            rows.append([f"{title}, {arm}", spliced, right if title == "key-value" else "-", kl, same])
    return _table("float32 / bf16 | spliced | right, of 30 | KL | same first token", rows)


_EDIT_RUNS: Final = {
    "SmolLM2, float32": "fidelity-edits",
    "SmolLM2, bf16": "fidelity-edits-bfloat16",
    "smollm2-mla, float32": "fidelity-edits-mla",
}


def _edits() -> str:
    rows = []
    for title, folder in _EDIT_RUNS.items():
        for cell in _read(f"{folder}/summary.json")["edits"]:
            if cell["group"] == "all" and cell["arm"] in ("in_place", "notes"):
                recovery = [_interval(cell["recovery"], _hundredths), _hundredths(cell["recovery_p10"])]
                kl = [
                    f"{divergence(cell['kl']['value'])} / {divergence(cell['kl_max'])}",
                    percent(cell["spliced_share"]),
                ]
                where = [title, f"{cell['n']}, {cell['num_templates']}", f"`{cell['arm']}`"]
                rows.append([*where, *recovery, *kl])
    return _table("model | prompts, templates | policy | recovery, mean | 10th perc. | KL mean / max | spliced", rows)


def _hundredths(value: float) -> str:
    return f"{value:.2f}"


def _turns() -> str:
    rows = []
    for folder in ("fidelity-turns", "fidelity-turns-toggle", "fidelity-turns-return"):
        for one in _read(f"{folder}/summary.json")["drifts"]:
            kl, total = one["kl"], sum(one["prompt_tokens"])
            shares = [percent(sum(one[f"{kind}_tokens"]) / total) for kind in ("chunk_hit", "computed")]
            quarter = len(kl) // 4
            means = [divergence(fmean(part)) for part in (kl, kl[:quarter], kl[-quarter:])]
            rows.append([f"{one['source']}, `{one['arm']}`", *shares, *means, percent(one["top1"])])
    return _table("field, policy | spliced | computed | KL | first 16 turns | last 16 | same first token", rows)


def _compose() -> str:
    cells = {(c["num_blocks"], c["donors"], c["arm"]): c for c in _cells("fidelity-compose")}
    columns = [(donors, f"seam-{seam}") for donors in ("isolated", "context") for seam in (0, 1, 32)]
    rows = []
    for number in sorted({number for number, *_ in cells}):
        found = [cells.get((number, *column)) for column in columns]
        rows.append([str(number), *("-" if cell is None else divergence(cell["kl"]["value"]) for cell in found)])
    return _table("skills | alone, seam 0 | 1 | 32 | together, seam 0 | 1 | 32", rows)


def _speculation() -> str:
    rows = []
    for setup in (*_read("speculation-standalone.json.gz")["setups"], *_read("speculation.json.gz")["setups"]):
        flags = setup["flags"].split()
        same = [
            f"{sum(a['tokens'] == b['tokens'] for a, b in zip(setup[arm], setup[f'{arm}_draft'], strict=True))} of "
            f"{len(setup[arm])}"
            for arm in ("stock", "pic")
        ]
        passes = [
            sum(len(one["tokens"]) - 1 for one in setup[arm]) / sum(one["num_verified"] for one in setup[arm])
            for arm in ("stock_draft", "pic_draft", "shift_zero")
        ]
        draft = flags[flags.index("--speculative-algorithm") + 1]
        rows.append([f"{draft}, {setup['model']}", *same, *map(_near_one, passes)])
    header = "draft | same answer with it: stock | spliced | accepted a pass: stock | spliced | at shift 0"
    return _table(header, rows)


def _shift_zero() -> str:
    rows = []
    for one in _read("shift-zero.json")["setups"]:
        place = f"{one['model']}, {one['dtype']}, TP {one['tp_size']}, pages of {one['page_size']}"
        rows.append([place, *(divergence(one[arm]["kl_mean"]) for arm in ("spliced", "exact_hit"))])
    return _table("served by its own chunks | KL spliced | KL of an exact hit", rows)


def _idle() -> str:
    titles = {"": "one client, 512 tokens", "-8": "8 clients, 256 tokens", "-8-off": "8 clients, against `mode: off`"}
    rows = []
    for suffix, title in titles.items():
        record = _read(f"idle-overhead{suffix}.json")
        starts = f"{len(record['starts'])} of {record['pairs']} pairs"
        rows.append([title, *(_interval(record["ratios"][key], _near_one) for key in ("ttft", "rate", "cpu")), starts])
    return _table("nothing to reuse | TTFT | requests per second | processor time | starts", rows)


def _soak() -> str:
    titles = {"soak": "overload and faults", "soak-dp-attention": "DP attention, 2 ranks, MLA"}
    titles |= {"soak-retractions": "forced retractions, all audited", "soak-page16": "the same, pages of 16"}
    rows = []
    for name, title in titles.items():
        run = _read(f"{name}.json")
        keys = ("requests", "retractions", "evicted_tokens", "compared", "idle_points", "spliced_rows_checked")
        wrong = sum(run[key] for key in ("mismatches", "leaks", "stale_rows", "failures"))
        rows.append([title, f"{run['seconds'] / 60:.0f} min", *(count(run[key]) for key in keys), str(wrong)])
    header = "soak | time | requests | retractions | tokens evicted | answers compared | idle points"
    return _table(f"{header} | spliced rows checked | wrong", rows)


def _core() -> str:
    rows = []
    for one in _read("core.json")["timings"]:
        recovered = percent(one["recovered"], 2)
        times_ = [f"{one['p50_ms']:.2f}", f"{one['p90_ms']:.2f}"]
        rows.append([one["case"], *times_, recovered, f"{one['p50_ms'] / one['fastcdc_ms']:.2f}"])
    return _table("prompt | p50, ms | p90, ms | recovered | times FastCDC alone", rows)


def _host() -> str:
    rows = []
    for one in _read("host.json")["timings"]:
        steps = {name: step["p50_us"] for name, step in one["steps"].items()}
        rest = sum(us for name, us in steps.items() if name not in ("plan", "tree", "publish"))
        shown = (steps["plan"], steps["tree"], rest, one["total_p50_us"], one["total_min_us"], steps["publish"])
        rows.append([one["case"], str(one["num_runs"]), *(f"{us:,.0f}" for us in shown)])
    return _table("prompt | runs | plan | tree | other steps | to the logits | least | publish", rows)


def _cost_gate() -> str:
    rows = [
        [row["machine"]["name"], percent(row["oracle_splices"], 0), percent(row["gate"]["wrong"])]
        + [percent(row[rule]["lost"], 2) for rule in ("gate", "always", "short_slope")]
        + [f"{row['gate']['worst_ms']:.2f} ms"]
        for row in _read("cost-gate.json")["reported"]
        if row["oracle_splices"] < 0.985
    ]
    header = "machine | oracle splices | gate differs | gate loses | always splicing loses | short slope loses"
    return _table(f"{header} | gate at worst", rows)


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "gain-tokens": _gain_tokens,
    "gain-times": _gain_times,
    "earlier": _earlier,
    "lasting": _lasting,
    "recall": _recall,
    "grid": _grid,
    "guarded": partial(_trace_cells, "fidelity-opendevin-notes", 256),
    "tails": partial(_trace_cells, "fidelity-opendevin-defaults", 0),
    "questions": _questions,
    "edits": _edits,
    "turns": _turns,
    "compose": _compose,
    "speculation": _speculation,
    "shift-zero": _shift_zero,
    "idle": _idle,
    "soak": _soak,
    "core": _core,
    "host": _host,
    "cost-gate": _cost_gate,
}


if __name__ == "__main__":
    sys.exit(main())
