"""The census as text for a terminal, `WIDTH` columns wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from pic_traces.source import short_name
from rich.console import Console, RenderableType
from rich.table import Table

from sglang_pic.census.pools import KNEE, Pool, Pools
from sglang_pic.census.tally import Census, Counts
from sglang_pic.census.windows import WINDOW_LEN
from sglang_pic.core import CoreConfig

WIDTH = 100

_MISSING = "-"
_MIN_NAME_WIDTH, _MAX_NAME_WIDTH = 14, 30

_Rows: TypeAlias = Sequence[tuple[str, Counts]]
_Columns: TypeAlias = Sequence[tuple[str, Callable[[Counts], str]]]

_SOURCES: _Columns = (
    ("sessions", lambda counts: f"{counts.sessions:,}" if counts.sessions else _MISSING),
    ("calls", lambda counts: f"{counts.calls:,}"),
    ("tokens", lambda counts: shown_tokens(counts.prompt_tokens)),
    ("prefix", lambda counts: _share(counts.prefix_tokens, counts.prompt_tokens)),
    ("spliced", lambda counts: _share(counts.chunk_tokens, counts.prompt_tokens)),
    ("new", lambda counts: _share(counts.new_tokens, counts.prompt_tokens)),
)
_RUNS: _Columns = (
    ("recovered", lambda counts: percent(counts.recovered)),
    ("runs/call", lambda counts: f"{counts.runs / counts.calls:.2f}"),
    ("same session", lambda counts: percent(ratio(counts.detail.chunk_tokens_same_session, counts.chunk_tokens))),
    ("another", lambda counts: percent(ratio(counts.detail.chunk_tokens_other_session, counts.chunk_tokens))),
)
_CHANGES: _Columns = (
    ("calls", lambda counts: f"{counts.detail.changed_fields.calls:,}"),
    ("fields", lambda counts: f"{counts.detail.changed_fields.fields:,}"),
    ("spliced after them", lambda counts: _share(counts.detail.changed_fields.chunk_tokens, counts.prompt_tokens)),
    ("new because of them", lambda counts: _share(counts.detail.changed_fields.guarded_tokens, counts.prompt_tokens)),
)
_BOUND: _Columns = (
    ("at any place", lambda counts: _share(_repeated(counts)[0], counts.prompt_tokens)),
    ("recovered", lambda counts: percent(ratio(counts.chunk_tokens, _repeated(counts)[0]))),
    ("after the prefix", lambda counts: _share(_repeated(counts)[1], counts.prompt_tokens)),
    ("recovered", lambda counts: percent(ratio(counts.chunk_tokens, _repeated(counts)[1]))),
)
_EDITS = {
    "notes": "With --edit in_place both would be spliced, and an answer may have the old value; with --edit recompile "
    "both would be computed.",
    "in_place": "Nothing is computed because of a changed field, and an answer may have the old value. With --edit "
    "notes some of these tokens would be computed, with --edit recompile all of them.",
    "recompile": "Everything after a changed field is computed. With --edit notes a part of it would be spliced, with "
    "--edit in_place all of it.",
}
_AGED = (
    "rows depend on more changes than --max-generation allows; no column counts them. With a larger one, or with "
    "--edit in_place, they would be spliced."
)


def render(census: Census, config: CoreConfig) -> str:
    """The tables, followed by an explanation of their words.

    Args:
        census: the result.
        config: the settings of the simulated server.
    """
    rows: list[tuple[str, Counts]] = [(short_name(counts.file), counts) for counts in census.files]
    if len(rows) > 1:
        rows.append(("all", census.total))
    told = [(name, counts) for name, counts in rows if counts.calls]
    parts: list[RenderableType] = [*_headline(census.total), *_states(census.total)]
    parts += _table("Prompt tokens, by their source in an unlimited cache", rows, _SOURCES)
    if census.pools is not None:
        parts += _pools(census.pools)
    if told:
        parts += _table("Spliced tokens: their runs, and the sessions that computed them", told, _RUNS)
    if any(counts.detail.changed_fields.fields for _, counts in told):
        title = "Changed fields: their values differ from those when the tokens after them were computed"
        parts += _table(title, told, _CHANGES)
        parts += [_EDITS[config.edit], ""]
    if aged := sum(counts.detail.changed_fields.aged_calls for counts in census.files):
        parts += [f"In {aged:,} calls {_AGED}", ""]
    if any(counts.detail.upper_bound for _, counts in told):
        title = f"Upper bound outside the prefix: windows of {WINDOW_LEN} tokens seen before, at every alignment"
        parts += _table(title, told, _BOUND)
    return as_text(*parts, *_notes(census), *_words(told, config))


def as_text(*parts: RenderableType) -> str:
    """Tables and sentences as lines of at most `WIDTH` columns; figures are never cut, so a table may be wider."""
    width = max(WIDTH, *(_least_width(part) for part in parts if isinstance(part, Table)), 0)
    console = Console(width=width, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as text:
        console.print(*parts, sep="\n")
    # Cells are filled up with spaces, also at the ends of lines.
    return "\n".join(line.rstrip() for line in text.get().split("\n")).rstrip("\n")


def _least_width(table: Table) -> int:
    """The width that a table without a frame needs for the columns that are not wrapped."""
    widths = [
        max(map(len, map(str, (column.header, *column.cells)))) if column.no_wrap else column.min_width or 1
        for column in table.columns
    ]
    return sum(widths) + 2 * (len(widths) - 1)


def shown_tokens(count: int) -> str:
    """A number of tokens, millions with two digits."""
    return f"{count:,}" if count < 1_000_000 else f"{count / 1e6:,.2f} M"


def ratio(part: int | None, whole: int | None) -> float | None:
    """The share, or None if a number is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def percent(ratio: float | None) -> str:
    """A share in percent."""
    return _MISSING if ratio is None else f"{ratio:.1%}"


def _headline(total: Counts) -> list[str]:
    if total.recovered is None:
        return []
    prefix, chunk = (ratio(part, total.prompt_tokens) for part in (total.prefix_tokens, total.chunk_tokens))
    served = f"A prefix cache serves {percent(prefix)} of {shown_tokens(total.prompt_tokens)} prompt tokens."
    more = f"This cache would splice {percent(chunk)}: {percent(total.recovered)} of what stock SGLang computes."
    inherited = total.detail.inherited_calls
    share = percent(ratio(inherited, total.calls))
    rest = f"{inherited:,} calls ({share}) splice nothing, but their prefix hits have spliced rows."
    return [f"{served} {more}", "", *([rest, ""] if inherited else [])]


def _states(total: Counts) -> list[str]:
    if (hybrid := total.detail.hybrid) is None:
        return []
    stock, placed = (percent(ratio(part, total.prompt_tokens)) for part in (hybrid.state_tokens, hybrid.placed_tokens))
    return [f"On a model with recurrent state SGLang's prefix cache serves {stock}, with checkpoints {placed}.", ""]


def _pools(found: Pools) -> list[RenderableType]:
    def row(pool: Pool) -> list[str]:
        sessions = "" if pool.tokens is None else f"{pool.tokens / found.session_tokens:.1f}"
        counts = (pool.prefix_tokens, pool.chunk_tokens, found.prompt_tokens - pool.hits, pool.host_tokens)
        shares = (percent(ratio(count, found.prompt_tokens)) for count in counts)
        return ["unlimited" if pool.tokens is None else f"{pool.tokens:,}", sessions, *shares]

    table = Table(box=None, pad_edge=False)
    for header in ("KV pool", "sessions", "prefix", "spliced", "new", "from the host"):
        table.add_column(header, justify="right")
    for pool in found.pools:
        table.add_row(*row(pool))
    enough = f"{KNEE:.0%} of an unlimited cache's hits"
    notes = [f"Set another --pool to see which size has {enough}: it is not between these."]
    if knee := found.knee:
        each = f"{knee / found.side_by_side:,.0f} for each session side by side ({found.side_by_side})"
        length = f"{knee / found.session_tokens:.1f} sessions' longest prompts"
        notes = [f"{enough} need about {knee:,.0f} tokens: {length}, {each}."]
    if refused := max(pool.refused_calls for pool in found.pools):
        notes.append(f"A server with --pool refuses {refused:,} calls, which are longer.")
    title = "The same by the KV pool's tokens; new tokens come from the host with HiCache, twice the pool's rows"
    return [title, table, *notes, ""]


def _table(title: str, rows: _Rows, columns: _Columns) -> list[RenderableType]:
    table = Table(box=None, pad_edge=False)
    # A name that is too long goes on in the next line: generators and numbered files differ at the end.
    name_width = max(len(name) for name, _ in rows)
    table.add_column(overflow="fold", min_width=min(name_width, _MIN_NAME_WIDTH), max_width=_MAX_NAME_WIDTH)
    for header, _ in columns:
        table.add_column(header, justify="right", no_wrap=True)
    for name, counts in rows:
        table.add_row(name, *(cell(counts) for _, cell in columns))
    return [title, table, ""]


def _notes(census: Census) -> list[str]:
    notes = []
    for counts in census.files:
        if not counts.detail.is_complete:
            notes.append(f"{counts.file}: stopped after {counts.calls:,} calls; the row counts these calls only.")
        if counts.detail.note:
            notes.append(f"{counts.file}: {counts.detail.note}.")
    if census.total.detail.note:
        notes.append(f"all: {census.total.detail.note}.")
    return [*notes, ""] if notes else []


def _words(told: _Rows, config: CoreConfig) -> list[RenderableType]:
    words = Table(box=None, pad_edge=False, show_header=False)
    words.add_row("prefix", "Begins like an earlier prompt and its answer; stock SGLang's prefix cache serves it too.")
    remarks = [
        "The census never evicts and serves one session after the other. A server with a full cache finds less "
        "(--pool), and sessions that run side by side shift tokens between the columns (--sessions)."
    ]
    if told:
        words.add_row(
            "spliced",
            "Was computed before at another position or after other text; this cache would move it here. That is an "
            "approximation; see Limits in the README.",
        )
        words.add_row("new", f"Is computed in any case, including {', '.join(_never_spliced(config))}.")
        words.add_row(
            "recovered", "spliced / (spliced + new): the share of stock SGLang's computed tokens that is saved."
        )
        detail = told[0][1].detail
        exact = f"Tokens are those of the tokenizer and the chat template in {detail.tokenizer}."
        approximate = f"Tokens are {detail.tokenizer}. Set --tokenizer DIR to count your model's tokens."
        remarks.append(exact if detail.tokenizer_exact else approximate)
    return [words, *remarks]


def _never_spliced(config: CoreConfig) -> list[str]:
    """The kinds of repeated tokens that the settings never splice."""
    least = max(config.min_run_tokens, config.seam_tokens + config.min_spliced_tokens)
    reasons = [f"most repeats shorter than {least} tokens"]
    if config.seam_tokens:
        reasons.append(f"the first {config.seam_tokens} tokens of a run (its seam)")
    if config.sink_tokens:
        reasons.append(f"the first {config.sink_tokens} tokens of a prompt")
    if config.tail_tokens:
        tails = config.tail_tokens, max(config.tail_tokens, config.other_tail_tokens)
        reasons.append("the last {} tokens of a prompt, {} after another text than before".format(*tails))
    if config.reordered == "compute":
        reasons.append("text in another order, such as documents")
    if config.reordered == "attend":
        reasons.append("of text in another order the longest run, as the second pass may")
    return reasons


def _repeated(counts: Counts) -> tuple[int | None, int | None]:
    """The upper bound: tokens in repeated windows outside the prefix, and in those entirely after it."""
    bound = counts.detail.upper_bound
    return (None, None) if bound is None else (bound.tokens, bound.tokens_behind)


def _share(count: int | None, total: int) -> str:
    return _MISSING if count is None else f"{shown_tokens(count)} {percent(ratio(count, total)):>6}"
