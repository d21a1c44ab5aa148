"""The verb `fidelity`: its arguments, and how they become a configuration."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pic_bench.fidelity.arms import DEFAULT_POLICIES, parse_policy
from pic_bench.fidelity.config import Config
from pic_bench.server_flags import server_flags
from pic_bench.study_command import OPTIONS, add_options, interrupt_on_sigterm
from sglang_pic.errors import BenchError, ConfigError

DTYPES = ("float32", "bfloat16")
DEFAULT_TRACE, QUICK_TRACE = "sample:opendevin", "clock:sample:agents"
QUICK_CALLS, QUICK_POLICIES = 6, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic fidelity`."""
    add_options(parser, OPTIONS, "model", "out")
    add_options(parser, Path(__file__).with_name("options.toml"))
    add_options(parser, OPTIONS, "server-arg", "start-timeout", "resume", "force", "quiet", "json")


def run(args: argparse.Namespace) -> int:
    """Measure and write the report.

    Returns:
        0.

    Raises:
        ConfigError: an argument is not allowed, or the folder cannot be used.
        TraceError: data cannot be read.
        BenchError: a server failed.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the server is stopped, the records stay.
    """
    from pic_bench.fidelity.config import claim_run
    from pic_bench.fidelity.report import headline, write_report
    from pic_bench.fidelity.runner import make_plan, run_fidelity
    from pic_bench.out_folder import print_report

    # An earlier run is deleted only once this one can begin.
    plan = make_plan(config_of(args))
    claim_run(args.out, plan.config, resume=args.resume, force=args.force)
    try:
        with interrupt_on_sigterm():
            measured = run_fidelity(plan, args.out, start_timeout_s=args.start_timeout, quiet=args.quiet)
    except (BenchError, KeyboardInterrupt):
        print(f"sglang-pic: what was measured stays in {args.out}; go on with --resume", file=sys.stderr)
        raise
    print(f"sglang-pic: {measured} prompts measured", file=sys.stderr)
    write_report(args.out)
    print_report(args.out, headline, as_json=args.json)
    return 0


def config_of(args: argparse.Namespace) -> Config:
    """The configuration that parsed arguments ask for.

    Raises:
        ConfigError: an argument is not allowed.
    """
    if args.calls is not None and args.calls < 1:
        raise ConfigError(f"--calls {args.calls}: must be 1 or more.")
    policies = args.policy or DEFAULT_POLICIES[: QUICK_POLICIES if args.quick else None]
    for policy in policies:
        parse_policy(policy)
    return Config(
        model=args.model,
        data=tuple(args.data) or (QUICK_TRACE if args.quick else DEFAULT_TRACE,),
        dtypes=tuple(dict.fromkeys(args.dtype or DTYPES)),
        calls=QUICK_CALLS if args.quick and args.calls is None else args.calls,
        policies=tuple(policies),
        min_chunk_hit=args.min_chunk_hit,
        pool_tokens=args.max_total_tokens,
        server_args=server_flags(args.server_arg),
    )
