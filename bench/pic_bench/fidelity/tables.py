"""The tables of a fidelity report, made of cells: plain strings. Every row names its number of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from pic_bench.fidelity.record import Donors, Experiment
from pic_bench.fidelity.summary import Cell, Comparison
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import divergence, number, plural, points, score, share, signed, with_interval
from pic_bench.report.stats import Estimate

UNDECIDED = "†"
FLOOR_NAMES = {"exact": "exact hit (noise floor)", "retest": "full prefill again", "full": "full prefill"}
COMPILED = {Donors.ISOLATED: "alone", Donors.CONTEXT: "together"}
"""How skills were compiled."""
Write = Callable[[Cell], str]


class Titled(NamedTuple):
    """A table under a title; folded away where few will read it."""

    title: str
    table: Table
    folded: bool = False


def arm_name(arm: str) -> str:
    """An arm as the head of its row."""
    return FLOOR_NAMES.get(arm, "naive (not rotated)" if arm == "naive" else arm.replace("seam-", "seam "))


def kl_cell(cell: Cell) -> str:
    """Mean KL of the first token with its interval."""
    return with_interval(cell.kl, divergence)


def top1_cell(cell: Cell) -> str:
    """Agreement of the likeliest first token, marked where it says little."""
    return with_interval(cell.top1, share) + UNDECIDED * cell.says_little


def optional(value: float | None, write: Callable[[float], str]) -> str:
    """A figure, or `-` where it was not measured."""
    return "-" if value is None else write(value)


def crossed(cells: Sequence[Cell], unit: str, write: Write) -> Table:
    """A row per arm, a column per place (a number of blocks, a shift): one figure of each cell."""
    columns = sorted({place for cell in cells if (place := cell.place) is not None})
    at = {(cell.arm, cell.place): cell for cell in cells}
    rows = []
    for arm in dict.fromkeys(cell.arm for cell in cells):
        found = [at.get((arm, column)) for column in columns]
        sizes = sorted({cell.n for cell in found if cell is not None})
        size = "to".join(f" {n:,} " for n in dict.fromkeys((sizes[0], sizes[-1]))).strip() if sizes else "0"
        rows.append([arm_name(arm), size, *(write(cell) if cell is not None else "-" for cell in found)])
    return Table([unit, "n", *(f"{column:,}" for column in columns)], rows)


def detail_table(cells: Sequence[Cell], unit: str) -> Table:
    """Every metric of every cell."""
    place: dict[str, Write] = {unit: lambda cell: optional(cell.place, "{:,}".format)}
    return _table(cells, {**_ARM, **place, **_N, **_KL, **_DETAIL})


def question_table(cells: Sequence[Cell]) -> Table:
    """Scores beside the full prefill's, and the difference by prompt."""
    return _table(cells, {**_ARM, **_QUESTIONS})


def trace_table(cells: Sequence[Cell]) -> Table:
    """What a policy computes, and how far its answers are from the full prefill's."""
    return _table(cells, {"policy": _ARM["arm"], "calls (n)": _N["n"], **_TRACE})


def skills_table(cells: Sequence[Cell]) -> Table:
    """A row for every number of skills, way to compile them and seam; the longest seam, the server's, first."""
    header = ["skills", "compiled", "seam", "n", "of the skills spliced", "KL mean", "p95", "same first token"]
    rows = []
    for cell in sorted((cell for cell in cells if cell.donors in COMPILED), key=_order_of_skills):
        place = [plural(cell.num_blocks or 0, "skill"), COMPILED[cell.donors], str(cell.seam), f"{cell.n:,}"]
        kl, top1 = kl_cell(cell), top1_cell(cell)
        if cell.num_units == 1:
            # Prompts of a single library say nothing about other skills: no interval.
            kl, top1 = divergence(cell.kl.value), share(cell.top1.value) + UNDECIDED * cell.undecided
        spliced = share(cell.chunk_hit_tokens / max(1, cell.block_tokens))
        rows.append([*place, spliced, kl, divergence(cell.kl_p95), top1])
    return Table(header, rows)


def comparisons_table(comparisons: Sequence[Comparison], min_prompts: int) -> Table:
    """Pairs of arms with their difference, and whether its interval lies on one side of zero."""
    header = ["mean KL of", "where", "n", "first arm", "second arm", "difference by prompt", "first is higher"]
    rows = []
    for one in comparisons:
        row = [one.what, one.where, f"{one.n:,}", divergence(one.first), divergence(one.second)]
        row += [with_interval(one.difference, signed(divergence)), share(one.higher)]
        rows.append([*row, "too few" if min(one.n, one.num_units) < min_prompts else _side(one.difference)])
    return Table([*header, "interval"], rows)


def telling_table(cells: Sequence[Cell]) -> Table:
    """The cells that say most, for a terminal: of every experiment the largest place.

    Shown are the floor, the unrotated arm, seams 0, 1 and the longest, and all policies.
    """
    shown = []
    for cell in cells:
        same = [c for c in cells if (c.experiment, c.dtype, c.source) == (cell.experiment, cell.dtype, cell.source)]
        largest = _place(cell) == max(map(_place, same))
        seams = (None, 0, 1, max((c.seam for c in same if c.seam is not None), default=0))
        between = cell.experiment is not Experiment.TRACE and cell.seam not in seams
        if largest and cell.arm not in ("full", "retest") and not between:
            shown.append(cell)
    columns: dict[str, Write] = {
        "where": _where,
        "arm": lambda cell: cell.arm,
        **_N,
        "mean KL": kl_cell,
        "less floor": _of("against_floor.kl", signed(divergence)),
        "top-1": lambda cell: share(cell.top1.value) + UNDECIDED * cell.says_little,
        "less floor, points": _of("against_floor.top1", points),
    }
    return Table(list(columns), [[write(cell) for write in columns.values()] for cell in shown])


def _table(cells: Sequence[Cell], columns: Mapping[str, Write]) -> Table:
    """A row per cell, without the columns that nothing was measured for."""
    rows = [[write(cell) for write in columns.values()] for cell in cells]
    kept = [i for i, _ in enumerate(columns) if i == 0 or any(row[i] not in ("-", "") for row in rows)]
    return Table([list(columns)[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _of(field: str, write: Callable[[float], str]) -> Write:
    """A figure of the cell with its interval; `against_floor.FIELD` is a figure of its difference to the floor."""
    found = attrgetter(field)
    return lambda cell: with_interval(found(cell) if "." not in field or cell.against_floor else None, write)


def _less_floor(field: str, write: Callable[[float], str]) -> Write:
    """A paired difference to the floor; prompts that one of the two lacks are named."""
    shown = _of(f"against_floor.{field}", write)
    return lambda cell: (
        shown(cell)
        + (f" ({cell.against_floor.unpaired} not paired)" if cell.against_floor and cell.against_floor.unpaired else "")
    )


def _decided(cell: Cell) -> str:
    if cell.top1_decided is None:
        return "none is"
    return f"{with_interval(cell.top1_decided, share)} (n = {cell.top1_decided.n:,})"


def _computed(cell: Cell) -> str:
    return "100 %" if cell.arm == "exact" else with_interval(cell.share_of_exact, share)


def _place(cell: Cell) -> tuple[int, int, int]:
    return cell.num_blocks or 0, cell.shift or 0, cell.min_chunk_hit


def _where(cell: Cell) -> str:
    where = [cell.dtype, cell.experiment.value, cell.source]
    where += [plural(cell.num_blocks or 0, "run")] if cell.experiment is Experiment.GRID else []
    where += [plural(cell.num_blocks or 0, "skill")] if cell.experiment is Experiment.COMPOSE else []
    where += [f"shift {cell.shift:,}"] if cell.shift is not None else []
    where += [f"≥ {cell.min_chunk_hit} chunk-hit"] if cell.min_chunk_hit else []
    where += [cell.donors.value] if cell.donors.value not in ("none", "trace") else []
    return ", ".join(where)


def _order_of_skills(cell: Cell) -> tuple[int, int, int]:
    return -(cell.seam or 0), cell.num_blocks or 0, list(COMPILED).index(cell.donors)


def _side(difference: Estimate) -> str:
    if not difference.excludes_zero:
        return "includes 0"
    return "above 0" if difference.low > 0 else "below 0"


_ARM: dict[str, Write] = {"arm": lambda cell: arm_name(cell.arm)}
_N: dict[str, Write] = {"n": lambda cell: f"{cell.n:,}"}
_KL: dict[str, Write] = {
    "KL mean": kl_cell,
    "median": _of("kl_median", divergence),
    "p95": lambda cell: divergence(cell.kl_p95),
    "max": lambda cell: divergence(cell.kl_max),
    "KL less floor": _less_floor("kl", signed(divergence)),
}
_GREEDY: dict[str, Write] = {
    "agreed tokens, median": _of("agreed_tokens", "{:g}".format),
    "same to the end": _of("agrees_to_end", share),
}
_DETAIL: dict[str, Write] = {
    "cosine": _of("cosine", number),
    "top-1": top1_cell,
    "top-1, decided": _decided,
    "top-1 less floor, points": _less_floor("top1", points),
    "forced KL": _of("forced_kl", divergence),
    "perplexity": _of("perplexity", "{:.2f}".format),
    "of the full prefill": lambda cell: optional(cell.full_perplexity, "{:.2f}".format),
    "ratio": _of("perplexity_ratio", number),
    **_GREEDY,
    "K error": _of("key_error", divergence),
}
_QUESTIONS: dict[str, Write] = {
    "data": lambda cell: cell.source,
    "donors": lambda cell: cell.donors.value,
    **_N,
    "spliced": lambda cell: share(cell.chunk_hit_tokens / max(1, cell.prompt_tokens)),
    "score": _of("score", score),
    "of the full prefill": lambda cell: optional(cell.full_score, score) + UNDECIDED * cell.incompetent,
    "difference by prompt": lambda cell: _of("score_change", signed(score))(cell) + UNDECIDED * cell.incompetent,
    "exact match": _of("exact_match", share),
    "KL mean": kl_cell,
    "median": _KL["median"],
    "KL less floor": _KL["KL less floor"],
    "top-1": top1_cell,
    "top-1 less floor, points": _less_floor("top1", points),
}
_TRACE: dict[str, Write] = {
    "computed tokens, of exact hits'": _computed,
    "chunk-hit tokens": lambda cell: f"{cell.chunk_hit_tokens:,}",
    "top-1": top1_cell,
    "points to exact hits": _less_floor("top1", points),
    "top-1, decided": _decided,
    **_KL,
    "forced KL": _of("forced_kl", divergence),
    **_GREEDY,
}
