"""The verb `compare`: its arguments, and how they become the settings of a comparison."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pic_traces.source import TRACE_HELP

from pic_bench.server_flags import server_flags
from pic_bench.study_command import OPTIONS, add_options, interrupt_on_sigterm
from sglang_pic.adapter.doctor.model_folder import check_model
from sglang_pic.arguments import collect_after_dashes
from sglang_pic.errors import ConfigError

if TYPE_CHECKING:
    from pic_bench.compare.compare import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic compare`."""
    several = "several go to the same servers, each in a namespace of its own, and into one report"
    parser.add_argument("traces", nargs="+", metavar="TRACE", help=f"{TRACE_HELP}; {several}")
    add_options(parser, Path(__file__).with_name("options.toml"))
    add_options(parser, OPTIONS, "out", "force", "sessions", "limit-sessions", "limit-calls", "max-tokens")
    add_options(parser, OPTIONS, "start-timeout", "quiet", "json")
    parser.set_defaults(server_args=[])
    collect_after_dashes(parser)


def run(args: argparse.Namespace) -> int:
    """Run a comparison; 0 when every request was answered, 1 when some failed.

    Raises:
        ConfigError: an argument is not allowed, or the folder cannot be used.
        TraceError: the trace cannot be read.
        BenchError, ReplayError: a server or a replay failed.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the servers are stopped.
    """
    from pic_bench.compare.compare import run_compare
    from pic_bench.compare.report import headline
    from pic_bench.out_folder import print_report

    settings = _settings(args)
    with interrupt_on_sigterm():
        runs = run_compare(settings)
    print_report(args.out, headline, as_json=args.json)
    failed = sum(arm.failed for run in runs for arm in run.summary.arms.values())
    if failed:
        print(f"sglang-pic: {failed} requests failed; see {args.out / 'report.md'}", file=sys.stderr)
        return 1
    return 0


def _settings(args: argparse.Namespace) -> Settings:
    from pic_bench.compare.arms import build_arms, read_pic_config
    from pic_bench.compare.compare import Settings
    from pic_bench.compare.run_folder import Config, make_scenes

    check_model(args.model)
    kinds = [name.strip() for name in args.arms.split(",") if name.strip()]
    server_args = [*server_flags(args.server_arg, args.server_args)]
    pic_config = read_pic_config(args.pic_config)
    arms = build_arms(kinds, server_args=server_args, pic_config=pic_config)
    asked = {
        name: getattr(args, name)
        for name in ("model", "sessions", "limit_sessions", "limit_calls", "max_tokens", "pairs")
    }
    if args.pairs and args.sessions != 1:
        raise ConfigError(f"--sessions {args.sessions}: must be 1 with --pairs, which sends one call at a time.")
    asked |= {"trace": args.traces[0], "arms": [arm.name for arm in arms], "server_args": server_args}
    config = Config(**asked, pic_config=pic_config)
    return Settings(
        scenes=make_scenes(args.traces, args.out, config),
        arms=arms,
        out=args.out,
        force=args.force,
        start_timeout_s=args.start_timeout,
        quiet=args.quiet,
    )
