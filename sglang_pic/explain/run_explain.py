"""The verb `explain`: its arguments, the page's file, and the table that it prints."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from pic_traces.encode import load_encoder
from pic_traces.encode.encoded import Encoder
from pic_traces.logs import Passed
from pic_traces.source import short_name

from sglang_pic.census.inputs import (
    add_input_arguments,
    add_policy_arguments,
    check_inputs,
    output_of,
    policy_of,
    read_sessions,
    with_progress,
)
from sglang_pic.census.outcome import Outcome
from sglang_pic.census.simulate import Cache, simulate
from sglang_pic.core import CoreConfig
from sglang_pic.explain.grouping import Findings
from sglang_pic.output import write_whole

_NUM_CAUSES = 8
_NUM_TITLES = 3
_NUM_ADVICE = 3
_MUCH = 0.01
"""A bolder setting that splices this share of all prompt tokens more is worth a line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic explain`."""
    add_input_arguments(parser)
    parser.add_argument("--out", required=True, metavar="PAGE", help="the HTML file to write")
    parser.add_argument("--limit-calls", type=int, metavar="N", help="read only the first N calls, over all files")
    parser.add_argument("--force", action="store_true", help="replace PAGE if it exists")
    add_policy_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Write the page, print the worst causes, and return 0.

    Raises:
        ConfigError: a value is not allowed, or the page exists.
        TraceError: a file or the tokenizer cannot be read, or has no text; nothing is written.
        KeyboardInterrupt: interrupted; nothing is written.
    """
    # Installed with the extra `census`; `--help` must work without.
    from sglang_pic.explain import page

    reader = check_inputs(args)
    config = policy_of(args)
    out = output_of(args, "HTML file")
    encoder = load_encoder(args.tokenizer)
    # All files are read first, so that a bad line in the last one is reported now and not at the end.
    passed = {file: Passed(args.strict) for file in args.files}
    num_calls = sum(
        session.num_calls
        for file in args.files
        for session in read_sessions(file, args.limit_sessions, passed[file], reader)
    )
    num_calls = min(num_calls, args.limit_calls or num_calls)
    others = {
        "--edit in_place": policy_of(args, edit="in_place"),
        "--preset balanced": policy_of(args, preset="balanced"),
    }
    bolder = {flag: other for flag, other in others.items() if other != config}
    findings, spliced = Findings(), Counter[str]()
    sources = ((file, read_sessions(file, args.limit_sessions, reader=reader)) for file in args.files)
    outcomes = islice(simulate(sources, encoder, config=config, passed=passed), num_calls)
    for outcome in with_progress(_also_with(bolder, outcomes, encoder, spliced), num_calls, quiet=args.quiet):
        findings.add(outcome)
    least = findings.figures.chunk_tokens + _MUCH * findings.figures.prompt_tokens
    gains = [(flag, count) for flag, count in spliced.items() if count >= least]
    text = page.html_page(findings, _title(args.files), encoder.name, gains, is_exact=encoder.is_exact)
    write_whole(out, text.encode())
    _print_causes(findings, gains)
    notes = [f"{short_name(file)}: {summary}" for file in args.files if (summary := passed[file].summary())]
    if difference := findings.figures.difference(is_exact=encoder.is_exact):
        notes.append(difference)
    for note in [*notes, *dict.fromkeys(note for one in passed.values() for note in one.notes)]:
        print(f"note: {note}.")
    print(f"page: {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0


def _also_with(
    settings: Mapping[str, CoreConfig], outcomes: Iterable[Outcome], encoder: Encoder, spliced: Counter[str]
) -> Iterator[Outcome]:
    """The outcomes, while `spliced` counts what a cache with each of the settings splices of the same calls."""
    file, caches = None, dict[str, Cache]()
    for outcome in outcomes:
        if file != outcome.ref.file:
            file = outcome.ref.file
            caches = {flag: Cache(config, encoder) for flag, config in settings.items()}
        for flag, cache in caches.items():
            spliced[flag] += cache.serve(outcome.ref, outcome.agent, outcome.encoded).num_chunk_hit
        yield outcome


def _title(files: Sequence[str]) -> str:
    names = [short_name(file) for file in files]
    more = f" and {len(names) - _NUM_TITLES} more" if len(names) > _NUM_TITLES else ""
    return ", ".join(names[:_NUM_TITLES]) + more


def _print_causes(findings: Findings, gains: Sequence[tuple[str, int]]) -> None:
    figures, causes = findings.figures, findings.ranked()
    new_len = figures.prompt_tokens - figures.prefix_tokens - figures.chunk_tokens
    parts = (("prefix hit", figures.prefix_tokens), ("spliced", figures.chunk_tokens), ("computed", new_len))
    shares = ", ".join(f"{name} {num / figures.prompt_tokens:.1%}" for name, num in parts if figures.prompt_tokens)
    if figures.guarded_tokens:
        shares += f" ({figures.guarded_tokens / figures.prompt_tokens:.1%} guarded)"
    print(f"{figures.calls:,} calls, {figures.prompt_tokens:,} prompt tokens: {shares or '-'}")
    for flag, count in gains:
        risk = ", and an answer may have the old value" if "edit" in flag else ""
        print(f"With {flag} {count:,} tokens ({count / figures.prompt_tokens:.1%}) would be spliced{risk}.")
    rows = []
    for group in causes[:_NUM_CAUSES]:
        total = group.total
        if total.num_lost:
            counts = (total.num_lost, total.num_spliced, total.num_guarded, total.num_calls)
            rows.append((*(f"{count:,}" for count in counts), group.cause.label, group.places[0].signature))
    if figures.appending_calls:
        appended = f"{figures.appended_tokens:,}", "-", f"{figures.appending_calls:,}"
        rows.append(("-", *appended, "(nothing: appended text repeats)", ""))
    if not rows:
        print("\nNo break cost tokens.\n")
        return
    print(f"\n{_table(rows)}\n")
    print(
        "lost: cached before, but a prefix cache computes them again; spliced: those that this cache moves;\n"
        "guarded: computed, because a field before them has another value."
    )
    for group in causes[:_NUM_ADVICE]:
        if group.total.num_lost:
            print(f"\n{group.cause.label}. {group.advice}")
    print()


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    from rich.table import Table

    from sglang_pic.census.table import as_text

    table = Table(
        "lost", "spliced", "guarded", "calls", "what broke the prefix", "worst place", box=None, pad_edge=False
    )
    for column in table.columns[:4]:
        column.justify, column.no_wrap = "right", True
    for row in rows:
        table.add_row(*row)
    return as_text(table)
