"""Owns report.md of a fidelity run, and the short text that the terminal shows.

It must not know HTML or how figures are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from pic_bench.fidelity.numbers import divergence, points, share, signed, with_interval
from pic_bench.fidelity.record import Experiment
from pic_bench.fidelity.sections import Part, claims_by_question, parts, verdict
from pic_bench.fidelity.summary import Cell, Summary, Worst, seam_of
from pic_bench.fidelity.tables import UNDECIDED, arm_name
from pic_bench.fidelity.words import DEFINITIONS, facts, limits_of
from pic_bench.report.markdown import markdown_table
from pic_bench.report.tables import Table, plural

__all__ = ["headline", "markdown_report", "worst_words"]


def headline(summary: Summary) -> str:
    """The cells that say most and the answers without their figures, as a person reads them in a terminal."""
    rows = [_row(cell) for cell in _telling(summary.cells)]
    header = ["where", "arm", "n", "mean KL", "less floor", "top-1", "less floor, points"]
    text = [f"# Fidelity of {summary.model}", markdown_table(Table(header, rows))]
    if any(UNDECIDED in row[5] for row in rows):
        text.append(f"{UNDECIDED}: the full prefill itself is not competent here.")
    answers = []
    for question, claims in claims_by_question(summary):
        for word in dict.fromkeys(verdict(claim) for claim in claims):
            where = "; ".join(claim.where for claim in claims if verdict(claim) == word)
            answers.append(f"{question} {word}: {where}.")
    return "\n\n".join([*text, _bullets(answers)]) + "\n"


def markdown_report(summary: Summary) -> str:
    """The whole of report.md."""
    text = [f"# Fidelity of {summary.model}", "## What this says", *_claims(summary)]
    for part in parts(summary):
        text += _part(part)
    if summary.worst:
        text += ["## Prompts that moved furthest", *(_worst(worst) for worst in summary.worst)]
    text += ["## Limits", _bullets(limits_of(summary))]
    text += ["## Words", _bullets([f"**{word}**: {meaning}" for word, meaning in DEFINITIONS])]
    text += ["## How it was measured", _bullets([f"**{what}**: {value}" for what, value in facts(summary)])]
    return "\n\n".join(text) + "\n"


def worst_words(worst: Worst) -> list[str]:
    """Where a prompt stands, how far it moved, what became of its likeliest token, how much was spliced."""
    place = [worst.experiment.value, worst.dtype, worst.source, worst.prompt, arm_name(worst.arm)]
    place += [worst.donors.value] + ([f"shift {worst.shift:,}"] if worst.shift is not None else [])
    floor = "" if worst.floor_kl is None else f" (floor {divergence(worst.floor_kl)})"
    first = "same" if worst.top1_agrees else "another"
    return [
        ", ".join(place),
        f"KL {divergence(worst.kl)}{floor}",
        f"{first} likeliest token (probability {worst.top1_probability:.2f})",
        f"{worst.chunk_hit_tokens:,} of {worst.prompt_tokens:,} tokens spliced",
    ]


def _telling(cells: Sequence[Cell]) -> list[Cell]:
    """Of every experiment the largest place: the floor, the unrotated arm, seams 0, 1 and the longest, all policies."""
    kept = []
    for cell in cells:
        same = [c for c in cells if (c.experiment, c.dtype, c.source) == (cell.experiment, cell.dtype, cell.source)]
        largest = max((c.num_blocks or 0, c.shift or 0, c.min_chunk_hit) for c in same)
        last = (cell.num_blocks or 0, cell.shift or 0, cell.min_chunk_hit) == largest
        seams = [seam for c in same if (seam := seam_of(c.arm)) is not None]
        between = cell.experiment is not Experiment.TRACE and seam_of(cell.arm) not in (
            None,
            0,
            1,
            max(seams, default=0),
        )
        if last and cell.arm not in ("full", "retest") and not between:
            kept.append(cell)
    return kept


def _row(cell: Cell) -> list[str]:
    where = [cell.dtype, cell.experiment.value, cell.source]
    where += [plural(cell.num_blocks or 0, "run")] if cell.experiment is Experiment.GRID else []
    where += [f"shift {cell.shift:,}"] if cell.shift is not None else []
    where += [f"≥ {cell.min_chunk_hit} chunk-hit"] if cell.min_chunk_hit else []
    where += [cell.donors.value] if cell.donors.value not in ("none", "trace") else []
    against = cell.against_floor
    row = [", ".join(where), cell.arm, f"{cell.n:,}", with_interval(cell.kl, divergence)]
    row.append(with_interval(against.kl, signed(divergence)) if against else "-")
    row.append(share(cell.top1.value) + UNDECIDED * (cell.undecided or cell.incompetent))
    return [*row, with_interval(against.top1, points) if against else "-"]


def _claims(summary: Summary) -> list[str]:
    text = []
    for question, claims in claims_by_question(summary):
        lines = [f"**{verdict(claim)}** ({claim.where}). {claim.text}" for claim in claims]
        text += [f"**{question}**", _bullets(lines)]
    return text or ["No question can be asked of these records."]


def _part(part: Part) -> list[str]:
    text = [f"## {part.title}", *part.notes]
    text += [f"![{picture.title}]({picture.name}.svg)" for picture in part.pictures]
    for titled in part.tables:
        shown = markdown_table(titled.table)
        if titled.folded:
            text.append(f"<details><summary>{titled.title}</summary>\n\n{shown}\n\n</details>")
        else:
            text += [f"**{titled.title}**", shown] if titled.title else [shown]
    return text


def _worst(worst: Worst) -> str:
    line = f"- {'; '.join(worst_words(worst))}"
    if not worst.text:
        return line
    # A fence longer than any in the text, so that the text cannot end it.
    longest = max((len(run) for run in _backticks(worst.text)), default=0)
    fence = "`" * max(3, longest + 1)
    body = "\n".join(f"  {row}" for row in worst.text.splitlines())
    return f"{line}\n\n  {fence}text\n{body}\n  {fence}"


def _backticks(text: str) -> list[str]:
    return "".join(letter if letter == "`" else " " for letter in text).split()


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
