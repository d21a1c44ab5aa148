"""The verb `census`: its arguments and its output."""

from __future__ import annotations

import argparse
from pathlib import Path

from pic_traces.encode import load_encoder, model_folder

from sglang_pic.census.inputs import (
    add_input_arguments,
    add_policy_arguments,
    check_inputs,
    policy_of,
    with_progress,
)
from sglang_pic.census.pool_picture import picture
from sglang_pic.census.simulate import CacheScope
from sglang_pic.census.state_config import state_rules
from sglang_pic.census.states import StateRules
from sglang_pic.census.survey import Survey
from sglang_pic.census.windows import WindowSearch
from sglang_pic.errors import ConfigError
from sglang_pic.output import write_whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic census`."""
    add_input_arguments(parser)
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
    parser.add_argument(
        "--sessions",
        type=int,
        default=1,
        metavar="N",
        help="sessions of a file side by side: they take turns, a call each (default: 1)",
    )
    parser.add_argument(
        "--pool",
        type=int,
        metavar="TOKENS",
        help="also count the hits in a KV pool of so many tokens, and in smaller and larger ones",
    )
    parser.add_argument("--picture", metavar="FILE.svg", help="draw the hits by pool size there; with --pool")
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

    reader = check_inputs(args)
    _check_pool(args)
    config, states = policy_of(args), None
    if args.hybrid:
        states = StateRules() if args.tokenizer is None else state_rules(model_folder(args.tokenizer))
    survey = Survey(
        args.files,
        encoder=load_encoder(args.tokenizer),
        config=config,
        scope=CacheScope.ALL if args.shared_cache else CacheScope.FILE,
        limit_sessions=args.limit_sessions,
        make_search=WindowSearch if args.upper_bound else None,
        is_strict=args.strict,
        reader=reader,
        states=states,
        side_by_side=args.sessions,
        pool=args.pool,
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
        if args.picture and census.pools is not None:
            write_whole(Path(args.picture), picture(census.pools).encode())
    return 0


def _check_pool(args: argparse.Namespace) -> None:
    for name in ("sessions", "pool"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}={value!r}: must be 1 or more.")
    if args.picture is not None:
        if args.pool is None:
            raise ConfigError(f"--picture={args.picture!r}: shows hits by pool size; set --pool TOKENS, too.")
        path = Path(args.picture)
        if path.suffix != ".svg" or not path.parent.is_dir():
            raise ConfigError(f"--picture={args.picture!r}: must be a file .svg in a folder that exists.")
