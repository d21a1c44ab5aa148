"""The verb `compare`: its arguments, and how they become the settings of a comparison."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pic_traces.source import TRACE_HELP

from pic_bench.frame import interrupt_on_sigterm
from sglang_pic.arguments import collect_after_dashes

if TYPE_CHECKING:
    from pic_bench.compare.compare import Settings

FAILED_REQUESTS = 1
DEFAULT_ARMS = "stock,pic"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic compare`."""
    several = "several go to the same servers, each in a namespace of its own, and into one report"
    arms = (
        "arms in order: stock, pic, pic-off (patched server, every request opts out), stock-cold (stock with no "
        "prefix cache: how far prefix hits alone move stock's answers, the noise floor), stock-again (a second stock "
        f"run); a name may repeat (default: {DEFAULT_ARMS})"
    )
    flags = "further flags for every server, e.g. --server-arg='--page-size 16'; may repeat; "
    flags += "whatever follows a lone `--` does the same; {arm} in one is the arm's name"
    health = "seconds until a server must be healthy (900)"
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", help=f"{TRACE_HELP}; {several}")
    add("--model", required=True, metavar="DIR", help="model folder or hub name, as for `sglang serve`")
    add("--out", required=True, type=Path, metavar="DIR", help="the run's folder, new or empty")
    add("--force", action="store_true", help="overwrite an earlier comparison in --out")
    add("--arms", default=DEFAULT_ARMS, metavar="A,B,...", help=arms)
    add("--server-arg", action="append", default=[], metavar="ARGS", help=flags)
    add("--pic-config", metavar="JSON|FILE", help="settings of the pic arms: JSON text or a file")
    add("--sessions", type=int, default=1, metavar="N", help="sessions side by side (default: 1)")
    add("--limit-sessions", type=int, metavar="N", help="only the first N sessions of the trace")
    add("--limit-calls", type=int, metavar="N", help="only the first N calls of the trace")
    add("--max-tokens", type=int, default=16, metavar="N", help="output tokens a request (default: 16)")
    add("--start-timeout", type=float, default=900.0, metavar="S", help=health)
    add("--quiet", action="store_true", help="no progress on stderr")
    add("--json", action="store_true", help="print summary.json instead of the table")
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
        return FAILED_REQUESTS
    return 0


def _settings(args: argparse.Namespace) -> Settings:
    from pic_bench.compare.arms import build_arms, read_pic_config
    from pic_bench.compare.compare import Settings
    from pic_bench.compare.run_folder import Config, make_scenes

    names = [name.strip() for name in args.arms.split(",") if name.strip()]
    server_args = [word for text in args.server_arg for word in shlex.split(text)] + args.server_args
    pic_config = read_pic_config(args.pic_config)
    arms = build_arms(names, server_args=server_args, pic_config=pic_config)
    asked = {name: getattr(args, name) for name in ("model", "sessions", "limit_sessions", "limit_calls", "max_tokens")}
    names = [arm.name for arm in arms]
    config = Config(trace=args.traces[0], arms=names, server_args=server_args, pic_config=pic_config, **asked)
    return Settings(
        scenes=make_scenes(args.traces, args.out, config),
        arms=arms,
        out=args.out,
        force=args.force,
        start_timeout_s=args.start_timeout,
        quiet=args.quiet,
    )
