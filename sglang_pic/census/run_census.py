"""The verb `census`: its arguments and its output."""

from __future__ import annotations

import argparse

from pic_traces.encode import load_encoder
from pic_traces.source import TRACE_HELP

from sglang_pic.census.inputs import (
    add_input_arguments,
    add_policy_arguments,
    check_inputs,
    policy_of,
    state_rules_of,
    with_progress,
)
from sglang_pic.census.simulate import CacheScope
from sglang_pic.census.survey import Survey
from sglang_pic.census.windows import WindowSearch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic census`."""
    add_input_arguments(parser, f"{TRACE_HELP}; or a block trace")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON instead of tables")
    parser.add_argument(
        "--upper-bound",
        action="store_true",
        help="also search for repeats at every alignment, to show the share that is recovered (slower)",
    )
    parser.add_argument(
        "--shared-cache", action="store_true", help="keep one cache for all files (default: an empty one for each)"
    )
    parser.add_argument(
        "--hybrid",
        action="store_true",
        help="also count what a model with recurrent state, that of --tokenizer, would hit, and with checkpoints",
    )
    add_policy_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Count, print, and return 0.

    After an error or an interrupt the counts so far are printed.

    Raises:
        ConfigError: a value is not allowed.
        TraceError: a file or the tokenizer cannot be read.
        KeyboardInterrupt: the count was interrupted.
    """
    # Installed with the extra `census`; `--help` must work without.
    from sglang_pic.census.table import render

    check_inputs(args)
    config = policy_of(args)
    survey = Survey(
        args.files,
        encoder=load_encoder(args.tokenizer),
        config=config,
        scope=CacheScope.ALL if args.shared_cache else CacheScope.FILE,
        limit_sessions=args.limit_sessions,
        make_search=WindowSearch if args.upper_bound else None,
        is_strict=args.strict,
        states=state_rules_of(args.tokenizer) if args.hybrid else None,
    )
    # All files are read first, so that a bad line in the last one is reported now and not in an hour.
    num_calls = survey.prepare()
    try:
        for _ in with_progress(survey.run(), num_calls, quiet=args.quiet):
            pass
    finally:
        census = survey.result()
        if args.json:
            print(census.to_json())
        elif census.files:
            print(render(census, config))
    return 0
