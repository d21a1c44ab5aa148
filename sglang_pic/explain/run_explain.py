"""The verb `explain`: its arguments, the page's file, and the table that it prints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice

from pic_traces.encode import load_encoder
from pic_traces.logs import Passed
from pic_traces.source import short_name

from sglang_pic.census.inputs import (
    add_input_arguments,
    add_policy_arguments,
    check_inputs,
    policy_of,
    read_sessions,
    with_progress,
)
from sglang_pic.census.simulate import simulate
from sglang_pic.explain.data import Figures, Payload, PayloadBuilder
from sglang_pic.output import output_path, write_whole

_NUM_CAUSES = 8
_NUM_TITLES = 3
_NUM_ADVICE = 3


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

    check_inputs(args)
    config = policy_of(args)
    out = output_path(args.out, "HTML file", is_forced=args.force)
    encoder = load_encoder(args.tokenizer)
    # All files are read first, so that a bad line in the last one is reported now and not at the end.
    passed = {file: Passed(args.strict) for file in args.files}
    num_calls = sum(
        session.num_calls for file in args.files for session in read_sessions(file, args.limit_sessions, passed[file])
    )
    num_calls = min(num_calls, args.limit_calls or num_calls)
    builder = PayloadBuilder(num_calls)
    sources = ((file, read_sessions(file, args.limit_sessions)) for file in args.files)
    outcomes = islice(simulate(sources, encoder, config=config), num_calls)
    for outcome in with_progress(outcomes, num_calls, quiet=args.quiet):
        builder.add(outcome)
    payload = builder.build(encoder.name, is_exact=encoder.is_exact)
    write_whole(out, page.html_page(payload, builder.figures, _title(args.files)).encode())
    _print_causes(payload, builder.figures)
    notes = [f"{short_name(file)}: {summary}" for file in args.files if (summary := passed[file].summary())]
    if difference := builder.figures.difference(is_exact=encoder.is_exact):
        notes.append(difference)
    for note in [*notes, *dict.fromkeys(note for one in passed.values() for note in one.notes)]:
        print(f"note: {note}.")
    print(f"page: {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0


def _title(files: Sequence[str]) -> str:
    names = [short_name(file) for file in files]
    more = f" and {len(names) - _NUM_TITLES} more" if len(names) > _NUM_TITLES else ""
    return ", ".join(names[:_NUM_TITLES]) + more


def _print_causes(payload: Payload, figures: Figures) -> None:
    from rich.table import Table

    from sglang_pic.census.table import as_text

    new_len = figures.prompt_tokens - figures.prefix_tokens - figures.chunk_tokens
    parts = (("prefix hit", figures.prefix_tokens), ("recoverable", figures.chunk_tokens), ("new", new_len))
    shares = ", ".join(f"{name} {num / figures.prompt_tokens:.1%}" for name, num in parts if figures.prompt_tokens)
    if figures.guarded_tokens:
        shares += f" ({figures.guarded_tokens / figures.prompt_tokens:.1%} because of a changed field)"
    print(f"{len(payload.calls):,} calls, {figures.prompt_tokens:,} prompt tokens: {shares or '-'}\n")
    table = Table("lost", "recovered", "calls", "what broke the prefix", "worst place", box=None, pad_edge=False)
    for number, column in enumerate(table.columns):
        column.no_wrap, column.overflow = True, "ellipsis"
        if number < 3:
            column.justify, column.min_width = "right", len(str(column.header))
    for cause in payload.causes[:_NUM_CAUSES]:
        groups = [payload.groups[number] for number in cause.groups]
        if num_lost := sum(group.num_lost for group in groups):
            num_calls = sum(group.num_calls for group in groups)
            recovered = sum(group.num_recovered for group in groups)
            table.add_row(f"{num_lost:,}", f"{recovered:,}", f"{num_calls:,}", cause.label, groups[0].signature)
    if figures.appending_calls:
        appended = f"{figures.appended_tokens:,}", f"{figures.appending_calls:,}"
        table.add_row("-", *appended, "(nothing: appended text repeats)", "")
    if not table.rows:
        print("No break cost tokens.\n")
        return
    print(f"{as_text(table)}\n")
    print("lost: were there before, and a prefix cache computes them again; recovered: this cache moves these of them.")
    for cause in payload.causes[:_NUM_ADVICE]:
        if any(payload.groups[number].num_lost for number in cause.groups):
            print(f"\n{cause.label}. {cause.advice}")
    print()
