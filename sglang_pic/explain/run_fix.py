"""The verb `fix`: rewrites recorded requests as `explain` advises, and counts the effect."""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TextIO

from msgspec.structs import replace
from pic_traces.custom import CustomReader
from pic_traces.encode import load_encoder
from pic_traces.logs import Passed
from pic_traces.session import Session

from sglang_pic.census.inputs import (
    add_input_arguments,
    add_policy_arguments,
    check_inputs,
    output_of,
    policy_of,
    read_sessions,
    with_progress,
)
from sglang_pic.census.simulate import simulate
from sglang_pic.census.tally import Tally
from sglang_pic.core import MOST_REUSE, CoreConfig
from sglang_pic.errors import ConfigError
from sglang_pic.explain.gateways import GATEWAYS, rule, without_nonces
from sglang_pic.explain.rewrite import RULES, Rewriter, request_lines
from sglang_pic.nonces import NONCES
from sglang_pic.output import write_whole

_LITTLE = 0.03
"""Splices that save less of all prompt tokens are not worth an approximation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic fix`."""
    add_input_arguments(parser)
    parser.add_argument("--out", metavar="FILE", help="write the rewritten requests there, one a line (JSONL)")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.add_argument(
        "--gateway",
        choices=sorted(GATEWAYS),
        help="print a rule for this gateway that removes the known nonces of these logs, and nothing else",
    )
    add_policy_arguments(parser)
    rules = "\n".join(f"  {name:8} {rule}" for name, rule in RULES.items())
    parser.epilog = (
        f"what is rewritten:\n  nonces   known nonces of agents are removed\n{rules}\n\n"
        "The requests are counted as recorded and as rewritten, in a plain prefix cache and with the splices of\n"
        "this cache on top. If the rewritten ones need no splices, change the harness and do without the plugin.\n"
        "`explain` names the causes that no rule removes (compaction, cleared results, retrieved documents). The\n"
        "rewritten requests are a proposal: read them, because models may weigh moved text differently."
    )


def run(args: argparse.Namespace) -> int:
    """Rewrite, count, print, and return 0.

    Raises:
        ConfigError: a value is not allowed, FILE exists, or --gateway finds no nonce or comes with --out.
        TraceError: a log or the tokenizer cannot be read; nothing is written.
    """
    reader = check_inputs(args)
    if args.gateway is not None and args.out is not None:
        raise ConfigError(f"--out={args.out!r}: --gateway prints a rule and writes no requests; leave out one of them.")
    config, encoder = policy_of(args), load_encoder(args.tokenizer)
    out = None if args.out is None else output_of(args, "file")
    rewriter, passed = Rewriter(), {file: Passed(args.strict) for file in args.files}
    recorded = [*_read(args, passed, reader)]
    nonces = Counter[str]()
    stripped = [(file, [without_nonces(session, nonces) for session in sessions]) for file, sessions in recorded]
    if args.gateway is not None:
        if not nonces:
            raise ConfigError(
                f"--gateway={args.gateway!r}: the logs have none of the known nonces, {', '.join(NONCES)}."
            )
        print(rule(args.gateway, nonces), end="")
        _print_notes(passed, sys.stderr)
        return 0
    for _, sessions in stripped:
        rewriter.learn(sessions)
    groups = [rewriter.group(call) for _, sessions in stripped for session in sessions for call in session.calls()]

    def count(
        files: list[tuple[str, list[Session]]], config: CoreConfig, notes: dict[str, Passed] | None = None
    ) -> tuple[Tally, Counter[int]]:
        tally, num_computed = Tally(), Counter[int]()
        outcomes = simulate(files, encoder, config=config, passed=notes or defaultdict(Passed))
        for outcome in with_progress(outcomes, len(groups), quiet=args.quiet):
            tally.add(outcome)
            num_computed[groups[outcome.ref.number]] += len(outcome.encoded.tokens) - outcome.prefix_len
        return tally, num_computed

    before, num_before = count(recorded, config, passed)
    num_before = count(stripped, config)[1] if nonces else num_before
    while True:
        rewriter.num_changed.clear()
        rewriter.changed.clear()
        rewritten = [(file, [rewriter.rewrite(session) for session in sessions]) for file, sessions in stripped]
        after, num_after = count(rewritten, config)
        is_refused = after.calls < before.calls
        worse = {group for group in rewriter.changed if is_refused or num_after[group] >= num_before[group]}
        if not worse:
            break
        rewriter.left |= worse
    most, _ = count(rewritten, MOST_REUSE)
    if out is not None:
        write_whole(out, (line for _, sessions in rewritten for session in sessions for line in request_lines(session)))
    _print(rewriter, nonces, before, after, most)
    _print_notes(passed, sys.stdout)
    print(f"tokens are those of {encoder.name}" + (f"; written: {out}" if out else ""))
    return 0


def _read(
    args: argparse.Namespace, passed: dict[str, Passed], reader: CustomReader | None
) -> Iterator[tuple[str, list[Session]]]:
    """The files with their sessions, which are named apart by the file's number: what is written is one file."""
    for number, file in enumerate(args.files, start=1):
        name = f"{number}-" if len(args.files) > 1 else ""
        sessions = read_sessions(file, args.limit_sessions, passed[file], reader)
        yield file, [replace(session, session_id=f"{name}{session.session_id}") for session in sessions]


def _print_notes(passed: dict[str, Passed], stream: TextIO) -> None:
    for file, one in passed.items():
        if summary := one.summary():
            print(f"note: {file}: {summary}.", file=stream)
    for note in dict.fromkeys(note for one in passed.values() for note in one.notes):
        print(f"note: {note}.", file=stream)


def _print(rewriter: Rewriter, nonces: Counter[str], before: Tally, after: Tally, most: Tally) -> None:
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
    for name, num in nonces.most_common():
        nonce = NONCES[name]
        print(
            f"{num:,} of {before.calls:,} calls: {nonce.title} is removed from {nonce.place} (--gateway prints a rule"
        )
        print(f"  for a gateway); the agent leaves it out with {nonce.switch}")
    for name, text in RULES.items():
        if num := rewriter.num_changed[name]:
            print(f"{num:,} of {before.calls:,} calls: {text}")
    if rewriter.left:
        print(
            f"left as recorded, because their rewriting saves nothing: calls of {len(rewriter.left):,} system prompts"
        )
    print(f"\n{_verdict(before, after, most, is_changed=bool(rewriter.changed or nonces))}\n")


def _verdict(before: Tally, after: Tally, most: Tally, *, is_changed: bool) -> str:
    """What the counts mean for somebody who can change the harness, run the plugin, or both."""
    if before.prompt_tokens == before.prefix_tokens + before.chunk_tokens or not before.prompt_tokens:
        return "Nothing is computed twice."
    old, new = (tally.prefix_tokens / max(1, tally.prompt_tokens) for tally in (before, after))
    splices, at_most = (tally.chunk_tokens / max(1, tally.prompt_tokens) for tally in (after, most))
    does = f"The changes alone lift the prefix cache's hits from {old:.1%} to {new:.1%}"
    does = does if is_changed else "These rules find nothing that would help"
    more = f"splices would save another {splices:.1%} of the prompt tokens, {at_most:.1%} with --preset most"
    if max(splices, at_most) < _LITTLE:
        how = "With these changes" if is_changed else "As it is"
        return f"{how} you do not need this plugin: {more}, and are an approximation."
    return f"{does}; {more} (`explain`{' on the rewritten requests' if is_changed else ''} says where)."
