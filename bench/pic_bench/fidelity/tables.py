"""The tables of a fidelity report, made of cells: plain strings, once for every output.

It must not know Markdown, HTML or raw records. Every row names its number of prompts, and every table has the controls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pic_bench.fidelity.numbers import divergence, number, points, score, share, signed, with_interval
from pic_bench.fidelity.summary import Cell
from pic_bench.report.stats import Estimate
from pic_bench.report.tables import Table

__all__ = ["UNDECIDED", "arm_name", "crossed", "detail_table", "kl_cell", "question_table", "top1_cell", "trace_table"]

UNDECIDED = "†"
FLOOR_NAMES = {"exact": "exact hit (noise floor)", "retest": "full prefill again", "full": "full prefill"}


def arm_name(arm: str) -> str:
    """An arm as a row is headed."""
    return FLOOR_NAMES.get(arm, "naive (not rotated)" if arm == "naive" else arm.replace("seam-", "seam "))


def kl_cell(cell: Cell) -> str:
    """Mean KL of the first token with its interval."""
    return with_interval(cell.kl, divergence)


def top1_cell(cell: Cell) -> str:
    """Agreement of the likeliest first token, marked where it says little."""
    return with_interval(cell.top1, share) + _mark(cell.undecided or cell.incompetent)


def crossed(
    cells: Sequence[Cell],
    columns: Sequence[int],
    place: Callable[[Cell], int | None],
    unit: str,
    write: Callable[[Cell], str],
) -> Table:
    """A row per arm, a column per place (a number of blocks, a shift): one figure of each cell."""
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    at = {(cell.arm, place(cell)): cell for cell in cells}
    rows = []
    for arm in arms:
        found = [at.get((arm, column)) for column in columns]
        sizes = sorted({cell.n for cell in found if cell is not None})
        size = "to".join(f" {n:,} " for n in dict.fromkeys((sizes[0], sizes[-1]))).strip() if sizes else "0"
        rows.append([arm_name(arm), size, *(write(cell) if cell is not None else "-" for cell in found)])
    return Table([unit, "n", *(f"{column:,}" for column in columns)], rows)


def detail_table(cells: Sequence[Cell], place: Callable[[Cell], int | None], unit: str) -> Table:
    """Every metric of every cell."""
    header = ["arm", unit, "n", "KL mean", "median", "p95", "max", "KL less floor", "cosine", "top-1", "top-1, decided"]
    header += ["top-1 less floor, points", "forced KL", "perplexity", "of the full prefill", "ratio"]
    header += ["agreed tokens, median", "same to the end", "K error"]
    rows = []
    for cell in cells:
        where = place(cell)
        row = [arm_name(cell.arm), "-" if where is None else f"{where:,}", *_divergences(cell)]
        row += [_against(cell, lambda c: c.kl, signed(divergence)), with_interval(cell.cosine, number), top1_cell(cell)]
        row += [_decided(cell), _against(cell, lambda c: c.top1, points), with_interval(cell.forced_kl, divergence)]
        row += [with_interval(cell.perplexity, _two_digits), _plain(cell.full_perplexity, _two_digits)]
        row += [with_interval(cell.perplexity_ratio, number), with_interval(cell.agreed_tokens, _tokens)]
        row += [with_interval(cell.agrees_to_end, share), with_interval(cell.key_error, divergence)]
        rows.append(row)
    return _without_empty(Table(header, rows))


def question_table(cells: Sequence[Cell]) -> Table:
    """Scores beside the full prefill's, and the difference by prompt."""
    header = ["arm", "data", "donors", "n", "spliced", "score", "of the full prefill", "difference by prompt"]
    header += ["exact match"]
    header += ["KL mean", "median", "KL less floor", "top-1", "top-1 less floor, points"]
    rows = []
    for cell in cells:
        mark = _mark(cell.incompetent)
        row = [arm_name(cell.arm), cell.source, cell.donors.value, f"{cell.n:,}"]
        row += [share(cell.chunk_hit_tokens / max(1, cell.prompt_tokens)), with_interval(cell.score, score)]
        row += [_plain(cell.full_score, score) + mark, with_interval(cell.score_change, signed(score)) + mark]
        row += [with_interval(cell.exact_match, share), kl_cell(cell), with_interval(cell.kl_median, divergence)]
        row += [_against(cell, lambda c: c.kl, signed(divergence)), top1_cell(cell)]
        rows.append([*row, _against(cell, lambda c: c.top1, points)])
    return _without_empty(Table(header, rows))


def trace_table(cells: Sequence[Cell]) -> Table:
    """What a policy computes, and how far its answers are from the full prefill's."""
    header = [
        "policy",
        "calls (n)",
        "computed tokens, of exact hits'",
        "chunk-hit tokens",
        "top-1",
        "points to exact hits",
    ]
    header += [
        "top-1, decided",
        "KL mean",
        "median",
        "p95",
        "max",
        "KL less floor",
        "forced KL",
        "agreed tokens, median",
    ]
    header += ["same to the end"]
    rows = []
    for cell in cells:
        against = cell.against_floor
        paired = against if against is not None and against.baseline == "exact" else None
        computed = with_interval(paired.computed_share, share) if paired else "100 %" if cell.arm == "exact" else "-"
        row = [arm_name(cell.arm), f"{cell.n:,}", computed, f"{cell.chunk_hit_tokens:,}", top1_cell(cell)]
        row += [_against(cell, lambda c: c.top1, points), _decided(cell), *_divergences(cell)[1:]]
        row += [_against(cell, lambda c: c.kl, signed(divergence)), with_interval(cell.forced_kl, divergence)]
        rows.append([*row, with_interval(cell.agreed_tokens, _tokens), with_interval(cell.agrees_to_end, share)])
    return _without_empty(Table(header, rows))


def _divergences(cell: Cell) -> list[str]:
    median = with_interval(cell.kl_median, divergence)
    return [f"{cell.n:,}", kl_cell(cell), median, divergence(cell.kl_p95), divergence(cell.kl_max)]


def _against(cell: Cell, of: Callable[..., Estimate], write: Callable[[float], str]) -> str:
    """A paired difference to the floor; prompts that one of the two lacks are named."""
    against = cell.against_floor
    if against is None:
        return "-"
    left_out = f" ({against.unpaired} not paired)" if against.unpaired else ""
    return with_interval(of(against), write) + left_out


def _decided(cell: Cell) -> str:
    if cell.top1_decided is None:
        return "none is"
    return f"{with_interval(cell.top1_decided, share)} (n = {cell.top1_decided.n:,})"


def _without_empty(table: Table) -> Table:
    """Leave out the columns that nothing was measured for."""
    kept = [i for i, _ in enumerate(table.header) if i == 0 or any(row[i] not in ("-", "") for row in table.rows)]
    return Table([table.header[i] for i in kept], [[row[i] for i in kept] for row in table.rows])


def _plain(value: float | None, write: Callable[[float], str]) -> str:
    return "-" if value is None else write(value)


def _mark(says_little: bool) -> str:
    return UNDECIDED if says_little else ""


def _two_digits(value: float) -> str:
    return f"{value:.2f}"


def _tokens(value: float) -> str:
    return f"{value:g}"
