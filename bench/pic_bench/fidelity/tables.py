"""The tables of a fidelity report, made of cells: plain strings. Every row names its number of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pic_bench.fidelity.record import Experiment
from pic_bench.fidelity.summary import Cell, Comparison, seam_of
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import divergence, number, plural, points, score, share, signed, with_interval
from pic_bench.report.stats import Estimate

__all__ = [
    "UNDECIDED",
    "arm_name",
    "comparisons_table",
    "crossed",
    "detail_table",
    "kl_cell",
    "question_table",
    "telling_table",
    "top1_cell",
    "trace_table",
]

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


def comparisons_table(comparisons: Sequence[Comparison], min_prompts: int) -> Table:
    """Pairs of arms with their difference, and whether its interval lies on one side of zero."""
    header = ["mean KL of", "where", "n", "first arm", "second arm", "difference by prompt", "first is higher"]
    header.append("interval")
    rows = []
    for one in comparisons:
        row = [one.what, one.where, f"{one.n:,}", divergence(one.first), divergence(one.second)]
        row += [with_interval(one.difference, signed(divergence)), share(one.higher)]
        rows.append([*row, "too few" if min(one.n, one.num_units) < min_prompts else _side(one.difference)])
    return Table(header, rows)


def telling_table(cells: Sequence[Cell]) -> Table:
    """The cells that say most, for a terminal."""
    header = ["where", "arm", "n", "mean KL", "less floor", "top-1", "less floor, points"]
    return Table(header, [_telling_row(cell) for cell in _telling(cells)])


def _telling(cells: Sequence[Cell]) -> list[Cell]:
    """Of every experiment the largest place: the floor, the unrotated arm, seams 0, 1 and the longest, all policies."""
    kept = []
    for cell in cells:
        same = [c for c in cells if (c.experiment, c.dtype, c.source) == (cell.experiment, cell.dtype, cell.source)]
        largest = max((c.num_blocks or 0, c.shift or 0, c.min_chunk_hit) for c in same)
        last = (cell.num_blocks or 0, cell.shift or 0, cell.min_chunk_hit) == largest
        seams = [seam for c in same if (seam := seam_of(c.arm)) is not None]
        shown = (None, 0, 1, max(seams, default=0))
        between = cell.experiment is not Experiment.TRACE and seam_of(cell.arm) not in shown
        if last and cell.arm not in ("full", "retest") and not between:
            kept.append(cell)
    return kept


def _telling_row(cell: Cell) -> list[str]:
    where = [cell.dtype, cell.experiment.value, cell.source]
    where += [plural(cell.num_blocks or 0, "run")] if cell.experiment is Experiment.GRID else []
    where += [f"shift {cell.shift:,}"] if cell.shift is not None else []
    where += [f"≥ {cell.min_chunk_hit} chunk-hit"] if cell.min_chunk_hit else []
    where += [cell.donors.value] if cell.donors.value not in ("none", "trace") else []
    against = cell.against_floor
    row = [", ".join(where), cell.arm, f"{cell.n:,}", with_interval(cell.kl, divergence)]
    row.append(with_interval(against.kl, signed(divergence)) if against else "-")
    row.append(share(cell.top1.value) + _mark(cell.undecided or cell.incompetent))
    return [*row, with_interval(against.top1, points) if against else "-"]


def _side(difference: Estimate) -> str:
    if not difference.excludes_zero:
        return "includes 0"
    return "above 0" if difference.low > 0 else "below 0"


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
