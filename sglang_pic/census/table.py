"""The census as text for a terminal, at most 100 columns wide.

Owns the words and the layout. Must not know how anything was counted.
"""

from __future__ import annotations

import textwrap
from pathlib import PurePath
from typing import NamedTuple

from sglang_pic.census.tally import Census, Counts
from sglang_pic.core import NEAR_TAILS, CoreConfig

__all__ = ["WIDTH", "render"]

WIDTH = 100

_MISSING = "-"
_GAP = "  "


class _Row(NamedTuple):
    name: str
    counts: Counts


class _Table(NamedTuple):
    """A line for each row; the names are set in front of it when all widths are known."""

    title: str
    rows: list[_Row]
    lines: list[str]
    """The header first."""


def render(census: Census, config: CoreConfig) -> str:
    """The tables, and underneath in plain words what they mean.

    Args:
        census: the result.
        config: the settings it was made with.
    """
    rows = [_Row(_label(counts.file), counts) for counts in census.files]
    if len(rows) > 1:
        rows.append(_Row("all", census.total))
    # Block traces say nothing about chunks.
    told = [row for row in rows if row.counts.chunk_tokens is not None and row.counts.calls]
    tables = [_sources(rows)]
    if told:
        tables.append(_runs(told))
        if any(row.counts.detail.chunk_tokens_by_role for row in told):
            tables.append(_roles(told))
        if any(row.counts.detail.upper_bound for row in told):
            tables.append(_upper_bound(told))
    room = WIDTH - max(len(line) for table in tables for line in table.lines) - len(_GAP)
    width = min(max(len(row.name) for row in rows), room)
    blocks = [_headline(census), *(_lay_out(table, width) for table in tables), _remarks(census), _words(told, config)]
    return "\n\n".join(block for block in blocks if block)


def _headline(census: Census) -> str:
    total = census.total
    if total.chunk_tokens is None or total.recovered is None:
        return ""
    prefix, chunk = _ratio(total.prefix_tokens, total.prompt_tokens), _ratio(total.chunk_tokens, total.prompt_tokens)
    return _wrap(
        f"A prefix cache serves {_percent(prefix)} of {_tokens(total.prompt_tokens)} prompt tokens. This cache would "
        f"serve {_percent(chunk)} more: {_percent(total.recovered)} of what stock SGLang computes."
    )


def _sources(rows: list[_Row]) -> _Table:
    body = []
    for _, counts in rows:
        total = counts.prompt_tokens
        shares = [_share(part, total) for part in (counts.prefix_tokens, counts.chunk_tokens, counts.new_tokens)]
        body.append(
            [f"{counts.sessions:,}" if counts.sessions else _MISSING, f"{counts.calls:,}", _tokens(total), *shares]
        )
    header = ["sessions", "calls", "tokens", "prefix", "chunk", "new"]
    return _grid("Prompt tokens, and where an unlimited cache would take them from", rows, header, body)


def _runs(rows: list[_Row]) -> _Table:
    body = []
    for _, counts in rows:
        detail, lengths, chunk = counts.detail, counts.detail.run_lengths, counts.chunk_tokens or 0
        body.append(
            [
                _percent(counts.recovered),
                f"{(counts.runs or 0) / counts.calls:.2f}",
                _MISSING if lengths is None else f"{lengths.p10:,} / {lengths.p50:,} / {lengths.p90:,}",
                _percent(_ratio(detail.chunk_tokens_same_session, chunk)),
                _percent(_ratio(detail.chunk_tokens_other_session, chunk)),
            ]
        )
    header = ["recovered", "runs/call", "run p10/p50/p90", "same session", "another"]
    return _grid("What chunks add: runs, their lengths, and whose tokens they are", rows, header, body)


def _roles(rows: list[_Row]) -> _Table:
    lines = [""]
    for _, counts in rows:
        roles, chunk = counts.detail.chunk_tokens_by_role or {}, counts.chunk_tokens or 0
        # What would be shown as 0.0% is left out.
        shares = [f"{role} {_percent(tokens / chunk)}" for role, tokens in roles.items() if tokens * 2000 >= chunk]
        lines.append(textwrap.shorten(", ".join(shares) or _MISSING, 70, placeholder=" …"))
    return _Table("The messages that chunk tokens stand in", rows, lines)


def _upper_bound(rows: list[_Row]) -> _Table:
    body = []
    window_len = 0
    for _, counts in rows:
        bound = counts.detail.upper_bound
        if bound is None:
            body.append([_MISSING] * 4)
            continue
        window_len = bound.window_len
        body.append(
            [
                cell
                for found in (bound.tokens, bound.tokens_behind)
                for cell in (_share(found, counts.prompt_tokens), _percent(_ratio(counts.chunk_tokens, found)))
            ]
        )
    title = (
        f"Outside the prefix, a search for {window_len} equal tokens at every alignment, and what chunks get of it;\n"
        "at the right without windows that begin in the prefix"
    )
    return _grid(title, rows, ["finds", "chunks get", "finds behind it", "chunks get"], body)


def _remarks(census: Census) -> str:
    """What is to be said of single files."""
    lines = []
    for counts in census.files:
        if not counts.detail.is_complete:
            lines.append(f"{counts.file}: stopped after {counts.calls:,} calls; its row is of these.")
        if counts.detail.note:
            lines.append(f"{counts.file}: {counts.detail.note}.")
    if census.total.detail.note:
        lines.append(f"in all: {census.total.detail.note}.")
    return "\n".join(_wrap(line, _GAP) for line in lines)


def _words(told: list[_Row], config: CoreConfig) -> str:
    terms = [("prefix", "begins like an earlier prompt with its answer: what stock SGLang's cache serves.")]
    if told:
        small = [f"equal spans under {config.min_run_tokens} tokens"]
        if config.seam_tokens:
            small.append(f"the seams of runs ({config.seam_tokens} each)")
        if config.sink_tokens:
            small.append(f"the first {config.sink_tokens} of a prompt")
        if config.tail_tokens:
            most = NEAR_TAILS * config.tail_tokens
            small.append(f"up to {most} of its last where no donor's context fits")
        terms += [
            (
                "chunk",
                "was computed before at another place, or after other text: this cache would move it here. That is an "
                "approximation; see Limits in the README.",
            ),
            ("new", f"is computed in any case; among it {', '.join(small)}."),
            ("recovered", "chunk / (chunk + new): of what stock SGLang computes, what this cache would not."),
        ]
    width = max(len(term) for term, _ in terms)
    lines = [_wrap(f"{term:<{width}}{_GAP}{text}", " " * (width + len(_GAP))) for term, text in terms]
    lines.append(
        _wrap(
            "The cache never evicts, and sessions go one after the other. A server whose cache is full gets less, and "
            "sessions side by side change the split."
        )
    )
    if told:
        detail = told[0].counts.detail
        lines.append(_wrap(_tokenizer(detail.tokenizer or "", exact=bool(detail.tokenizer_exact))))
    return "\n".join(lines)


def _tokenizer(name: str, *, exact: bool) -> str:
    if exact:
        return f"Tokens are those of the tokenizer and the chat template in {name}."
    return f"Tokens are {name}. --tokenizer DIR counts those of your model."


def _grid(title: str, rows: list[_Row], header: list[str], body: list[list[str]]) -> _Table:
    """A table whose columns stand to the right."""
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    lines = [
        _GAP.join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in (header, *body)
    ]
    return _Table(title, rows, lines)


def _lay_out(table: _Table, name_width: int) -> str:
    names = ["", *(_shorten(row.name, name_width) for row in table.rows)]
    lines = [f"{name:<{name_width}}{_GAP}{line}".rstrip() for name, line in zip(names, table.lines, strict=True)]
    return "\n".join([table.title, *(line for line in lines if line)])


def _label(file: str) -> str:
    """What a file is called in the table: no folder, no usual ending."""
    if file.startswith(("gen:", "sample:")):
        return file
    name = PurePath(file).name
    for suffix in (".gz", ".jsonl", ".json"):
        name = name.removesuffix(suffix)
    return name or file


def _shorten(name: str, width: int) -> str:
    """The end of a name that is too long: there the options of generators and the numbers of files differ."""
    return name if len(name) <= width else f"…{name[len(name) - width + 1 :]}"


def _tokens(count: int) -> str:
    return f"{count:,}" if count < 1_000_000 else f"{count / 1e6:,.2f} M"


def _share(count: int | None, total: int) -> str:
    return _MISSING if count is None else f"{_tokens(count)} {_percent(_ratio(count, total)):>6}"


def _ratio(part: int | None, whole: int) -> float | None:
    return part / whole if part is not None and whole else None


def _percent(ratio: float | None) -> str:
    return _MISSING if ratio is None else f"{ratio:.1%}"


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
