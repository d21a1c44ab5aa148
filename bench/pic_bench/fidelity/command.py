"""The verb `fidelity`: its arguments, and how they become a configuration."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from pic_bench.fidelity.arms import DEFAULT_POLICIES, parse_policy
from pic_bench.fidelity.config import QUICK_SIZES, Amounts, Config
from pic_bench.fidelity.record import Experiment, TemplateSet
from pic_bench.server_flags import server_flags
from pic_bench.study_command import OPTIONS, add_options, interrupt_on_sigterm
from sglang_pic.core.settings import settings_of
from sglang_pic.errors import BenchError

DTYPES = ("float32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic fidelity`."""
    add_options(parser, OPTIONS, "model", "out")
    add_options(parser, Path(__file__).with_name("options.toml"))
    add_options(parser, OPTIONS, "server-arg", "start-timeout", "seed", "resume", "force", "quiet", "json")
    for size in settings_of(Amounts).values():
        text = size.description[0].lower() + size.description[1:].removesuffix(".")
        usual, quick = ("all" if n is None else n for n in (size.default, getattr(QUICK_SIZES, size.name)))
        help_ = f"{text} (default: {usual}; --quick: {quick})"
        parser.add_argument(f"--{size.name}", type=int, metavar="N", help=help_)


def run(args: argparse.Namespace) -> int:
    """Run the experiments and write the report.

    Returns:
        0.

    Raises:
        ConfigError: an argument is not allowed, or the folder cannot be used.
        TraceError: data cannot be read.
        BenchError: a server failed, or too many prompts were not served as meant.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the server is stopped, the records stay.
    """
    from pic_bench.fidelity.config import claim_run
    from pic_bench.fidelity.plan import make_plan
    from pic_bench.fidelity.report import headline, write_report
    from pic_bench.fidelity.runner import run_fidelity
    from pic_bench.out_folder import print_report

    # An earlier run is deleted only once this one can begin.
    plan = make_plan(_config(args))
    claim_run(args.out, plan.config, resume=args.resume, force=args.force)
    try:
        with interrupt_on_sigterm():
            outcome = run_fidelity(plan, args.out, start_timeout_s=args.start_timeout, quiet=args.quiet)
    except (BenchError, KeyboardInterrupt):
        print(f"sglang-pic: what was measured stays in {args.out}; go on with --resume", file=sys.stderr)
        raise
    resumed = f", {outcome.resumed} were there" if outcome.resumed else ""
    print(f"sglang-pic: {outcome.measured} prompts measured{resumed}", file=sys.stderr)
    if outcome.left_out:
        told = f"{outcome.left_out} prompts were not served as meant and are left out of every arm"
        print(f"sglang-pic: warning: {told}; see {args.out / 'left_out.jsonl'}", file=sys.stderr)
    write_report(args.out)
    print_report(args.out, headline, as_json=args.json)
    return 0


def _config(args: argparse.Namespace) -> Config:
    chosen = [Experiment.EDITS.value] if args.quick else [one.value for one in Experiment]
    for policy in args.policy:
        parse_policy(policy)
    experiments = tuple(Experiment(name) for name in dict.fromkeys(args.experiment or chosen))
    asked = {name: getattr(args, name) for name in settings_of(Amounts)}
    sizes = QUICK_SIZES if args.quick else Amounts()
    # A run that has no use for policies can be resumed after the default ones have changed.
    policies = tuple(args.policy) or (DEFAULT_POLICIES if Experiment.TRACE in experiments else ())
    return Config(
        model=args.model,
        data=tuple(args.data),
        experiments=experiments,
        dtypes=tuple(dict.fromkeys(args.dtype or DTYPES)),
        sizes=msgspec.structs.replace(sizes, **{name: value for name, value in asked.items() if value is not None}),
        policies=policies,
        min_chunk_hit=args.min_chunk_hit,
        pool_tokens=args.max_total_tokens,
        edit_set=TemplateSet(args.set),
        server_args=server_flags(args.server_arg),
        seed=args.seed,
    )
