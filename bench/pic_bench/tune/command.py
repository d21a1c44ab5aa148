"""The verb `tune`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from pic_traces.source import TRACE_HELP

from pic_bench.server_flags import server_flags
from pic_bench.study_command import OPTIONS, add_options, interrupt_on_sigterm
from sglang_pic.errors import BenchError, ConfigError

if TYPE_CHECKING:
    from pic_bench.tune.config import Sample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic tune`."""
    parser.add_argument("logs", nargs="+", metavar="LOGS", help=TRACE_HELP)
    add_options(parser, OPTIONS, "model", "out")
    add_options(parser, Path(__file__).with_name("options.toml"))
    add_options(parser, OPTIONS, "server-arg", "start-timeout", "seed", "resume", "force", "quiet", "json")


def run(args: argparse.Namespace) -> int:
    """Draw, rank, measure and write the report; 1 where nothing is certified.

    Raises:
        ConfigError: an argument is not allowed, or the folder cannot be used.
        TraceError: a log cannot be read.
        BenchError: a server failed.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the server is stopped, and what was measured stays.
    """
    from pic_bench.fidelity.cases.text import ModelText
    from pic_bench.out_folder import CONFIG, claim_or_continue, print_report, read_json, write_json
    from pic_bench.tune import ladder
    from pic_bench.tune.bounds import MAX_SESSIONS
    from pic_bench.tune.climb import climb
    from pic_bench.tune.config import RUN, SAMPLE, Config, Sample
    from pic_bench.tune.report import headline, write_report
    from pic_bench.tune.sample import draw
    from pic_bench.tune.verdict import Judge
    from sglang_pic.census.inputs import check_named_once

    check_named_once(args.logs)
    if args.time_limit is not None and not 0 < args.time_limit < math.inf:
        raise ConfigError(f"--time-limit={args.time_limit!r}: must be more than 0 minutes.")
    until = math.inf if args.time_limit is None else time.monotonic() + 60 * args.time_limit
    config = Config(
        logs=tuple(args.logs),
        model=args.model,
        budget=args.budget,
        dtype=args.dtype,
        sessions=args.sessions,
        seed=args.seed,
        pool_tokens=args.max_total_tokens,
        server_args=server_flags(args.server_arg),
        ladder=ladder.LADDER,
        server=args.base_url,
    )
    text = ModelText(Path(config.model))
    drawn = draw(config.logs, config.model, text, config.sessions, config.seed)
    _check_number(drawn.sample, Judge(drawn.sample, config.budget, []).needed("") or MAX_SESSIONS)
    claim_or_continue(args.out, RUN, config, resume=args.resume, force=args.force)
    write_json(args.out / CONFIG, config)
    path = args.out / SAMPLE
    try:
        with interrupt_on_sigterm():
            if path.exists():
                sample = read_json(path, Sample, "the sample of a run of tune")
                if msgspec.structs.replace(sample, reuse={}) != drawn.sample:
                    raise BenchError(f"{path}: another sample is drawn than when this run began; begin a new one.")
            else:
                reuse = ladder.survey(config.logs, config.model, quiet=args.quiet)
                sample = msgspec.structs.replace(drawn.sample, reuse=reuse)
                write_json(path, sample)
            drawn = drawn._replace(sample=sample)
            climb(config, drawn, text, args.out, until=until, start_timeout_s=args.start_timeout, quiet=args.quiet)
    except (BenchError, KeyboardInterrupt):
        print(f"sglang-pic: what was measured stays in {args.out}; go on with --resume", file=sys.stderr)
        raise
    summary = write_report(args.out)
    print_report(args.out, headline, as_json=args.json)
    return 0 if summary.certified else 1


def _check_number(sample: Sample, needed: int) -> None:
    """Refuse a single session, and say if the half that certifies has fewer than the budget needs without any loss."""
    if sample.sessions < 2:
        raise ConfigError(
            "one session alone has a call that fits; one has to choose and another to certify: give more logs."
        )
    if (certifying := sample.sessions - sample.num_choosing) < needed:
        print(
            f"sglang-pic: {certifying} sessions certify, and this budget needs {needed} even if nothing is lost: "
            "losses are measured, nothing will be certified; give more logs, or a larger --budget",
            file=sys.stderr,
        )
