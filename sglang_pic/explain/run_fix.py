"""The verb `fix`: rewrites recorded requests as `explain` advises, and counts the effect."""

from __future__ import annotations

import argparse

from pic_traces.encode import load_encoder
from pic_traces.logs import Passed

from sglang_pic.census.inputs import (
    add_input_arguments,
    add_policy_arguments,
    check_inputs,
    policy_of,
    read_sessions,
    with_progress,
)
from sglang_pic.census.simulate import simulate
from sglang_pic.census.tally import Tally
from sglang_pic.explain.rewrite import RULES, Rewriter, request_lines
from sglang_pic.output import output_path, write_whole

_LITTLE = 0.03
"""Splices that save less of all prompt tokens are not worth an approximation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic fix`."""
    add_input_arguments(parser)
    parser.add_argument("--out", metavar="FILE", help="write the rewritten requests there, one a line (JSONL)")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    add_policy_arguments(parser)
    rules = "\n".join(f"  {name:8} {rule}" for name, rule in RULES.items())
    parser.epilog = (
        f"what is rewritten:\n{rules}\n\n"
        "The requests are counted as recorded and as rewritten, in a plain prefix cache and with the splices of\n"
        "this cache on top. If the rewritten ones need no splices, change the harness and do without the plugin.\n"
        "`explain` names the causes that no rule removes (compaction, cleared results, retrieved documents). The\n"
        "rewritten requests are a proposal: read them, because models may weigh moved text differently."
    )


def run(args: argparse.Namespace) -> int:
    """Rewrite, count, print, and return 0.

    Raises:
        ConfigError: a value is not allowed, or FILE exists.
        TraceError: a log or the tokenizer cannot be read; nothing is written.
    """
    check_inputs(args)
    config, encoder = policy_of(args), load_encoder(args.tokenizer)
    out = None if args.out is None else output_path(args.out, "file", is_forced=args.force)
    rewriter, passed = Rewriter(), {file: Passed(args.strict) for file in args.files}
    num_calls = 0
    for file in args.files:
        sessions = list(read_sessions(file, args.limit_sessions, passed[file]))
        num_calls += sum(session.num_calls for session in sessions)
        rewriter.learn(sessions)
    rewritten = [
        (file, [rewriter.rewrite(session) for session in read_sessions(file, args.limit_sessions)])
        for file in args.files
    ]
    recorded = ((file, read_sessions(file, args.limit_sessions)) for file in args.files)
    before, after = Tally(), Tally()
    for tally, files in ((before, recorded), (after, rewritten)):
        for outcome in with_progress(simulate(files, encoder, config=config), num_calls, quiet=args.quiet):
            tally.add(outcome)
    if out is not None:
        write_whole(out, (line for _, sessions in rewritten for session in sessions for line in request_lines(session)))
    _print(rewriter, before, after, num_calls)
    for file in args.files:
        if summary := passed[file].summary():
            print(f"note: {file}: {summary}.")
    print(f"tokens are those of {encoder.name}" + (f"; written: {out}" if out else ""))
    return 0


def _print(rewriter: Rewriter, before: Tally, after: Tally, num_calls: int) -> None:
    from rich.table import Table

    from sglang_pic.census.table import as_text, percent, ratio, shown_tokens

    table = Table(
        "", "prompt tokens", "prefix cache hits", "splices add", "computed with both", box=None, pad_edge=False
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, tally in (("as recorded", before), ("rewritten", after)):
        total, left = tally.prompt_tokens, tally.prompt_tokens - tally.prefix_tokens - tally.chunk_tokens
        shares = (percent(ratio(part, total)) for part in (tally.prefix_tokens, tally.chunk_tokens, left))
        table.add_row(name, shown_tokens(total), *shares)
    print(f"{as_text(table)}\n")
    for rule, text in RULES.items():
        if changed := rewriter.num_changed[rule]:
            print(f"{changed:,} of {num_calls:,} calls: {text}")
    print(f"\n{_verdict(before, after, is_changed=rewriter.num_changed.total() > 0)}\n")


def _verdict(before: Tally, after: Tally, *, is_changed: bool) -> str:
    """What the counts mean for somebody who can change the harness, run the plugin, or both."""
    splices = after.chunk_tokens / max(1, after.prompt_tokens)
    more = "splices would save another"
    if before.prompt_tokens == before.prefix_tokens + before.chunk_tokens or not before.prompt_tokens:
        return "Nothing is computed twice."
    if splices < _LITTLE:
        how = "With these changes" if is_changed else "As it is"
        return (
            f"{how} you do not need this plugin: {more} {splices:.1%} of the prompt tokens, and are an approximation."
        )
    if not is_changed:
        return f"These rules find nothing to change; {more} {splices:.1%} of the prompt tokens (`explain` says where)."
    old, new = (tally.prefix_tokens / max(1, tally.prompt_tokens) for tally in (before, after))
    return (
        f"The changes alone lift the prefix cache's hits from {old:.1%} to {new:.1%}; {more} {splices:.1%} of the "
        "prompt tokens (`explain` on the rewritten requests says where)."
    )
