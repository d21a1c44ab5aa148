"""The verb `fidelity`: its arguments, and how they become a configuration."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pic_bench.fidelity.arms import DEFAULT_POLICIES, RECORDED, parse_policy
from pic_bench.fidelity.config import QUICK_SIZES, Config, Sizes
from pic_bench.fidelity.record import Change, Experiment, TemplateSet
from pic_bench.frame import interrupt_on_sigterm, retire
from sglang_pic.core.settings import settings_of
from sglang_pic.errors import BenchError, ConfigError

if TYPE_CHECKING:
    from pic_bench.fidelity.runner import Outcome


EXIT_FAILED = 1
DTYPES = ("float32", "bfloat16")
MIN_CHUNK_HIT = 256
SLOW = (Experiment.TRACE, Experiment.TURNS)
"""Not of a quick run, unless they are asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic fidelity`."""
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of the model, with its tokenizer")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the run's folder, new or empty")
    several = partial(parser.add_argument, action="append", default=[])
    several(
        "--data",
        metavar="FILE",
        help="a question set (JSON lines with `documents` and `qa`), a recorded trace, request logs or "
        "sample:opendevin; grid, shift and compose take their text from the first; may repeat (default: what the "
        "package carries)",
    )
    abouts = "; ".join(f"{experiment.value}: {experiment.about}" for experiment in Experiment)
    several(
        "--experiment",
        choices=[experiment.value for experiment in Experiment],
        help=f"{abouts}; may repeat (default: all; --quick: all but trace and turns)",
    )
    dtypes = f"number format of the server; may repeat (default: {' and '.join(DTYPES)}, one after the other)"
    several("--dtype", metavar="NAME", help=dtypes)
    _add_sizes(parser)
    several(
        "--policy",
        metavar="NAME=seam:N,tail:N,...",
        help="a policy of trace, edits and turns: settings of core.* without their unit (seam, tail, edit, ...), "
        "the server's where left out; may repeat, and the first says which calls of trace are measured (default: "
        "default and variants; edits always has in_place, notes and recompile, turns where none is named)",
    )
    several(
        "--order",
        metavar="NAME",
        help="recorded, reversed or shuffled-N (a seeded order for each N): order in which trace serves the sessions; "
        "may repeat: what is spliced in one order comes first in another (default: recorded)",
    )
    least = f"trace measures calls with so many chunk-hit tokens under the first policy (default: {MIN_CHUNK_HIT})"
    parser.add_argument("--min-chunk-hit", type=int, default=MIN_CHUNK_HIT, metavar="N", help=least)
    sets = "templates of edits: those for finding a rule, or those for judging it (default: report)"
    parser.add_argument("--set", choices=[one.value for one in TemplateSet], default="report", help=sets)
    ways = "how the field of turns goes on; may repeat (default: all)"
    parser.add_argument("--change", action="append", choices=[one.name.lower() for one in Change], help=ways)
    parser.add_argument("--resume", action="store_true", help="continue the run in --out, with the same arguments")
    parser.add_argument("--force", action="store_true", help="delete an earlier run in --out")
    worse = "exit 1 unless splicing without rotation is measurably worse"
    parser.add_argument("--check", action="store_true", help=worse)
    flags = "further flags for the server, e.g. --server-arg='--page-size 16'; may repeat"
    several("--server-arg", metavar="ARGS", help=flags)
    pool = "tokens of the server's KV pool (default: what the experiments need, at most 120000)"
    parser.add_argument("--max-total-tokens", type=int, metavar="N", help=pool)
    parser.add_argument(
        "--start-timeout", type=float, default=900.0, metavar="S", help="seconds until the server must be healthy (900)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the prompts (default: 0)")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument("--json", action="store_true", help="print summary.json instead of the table")


def run(args: argparse.Namespace) -> int:
    """Run the experiments and write the report; 1 where the check fails.

    Raises:
        ConfigError: an argument is not allowed, or the folder cannot be used.
        TraceError: data cannot be read.
        BenchError: a server failed, or too many prompts were not served as meant.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the server is stopped, and what was measured stays.
    """
    from pic_bench.fidelity.compared import check_naive
    from pic_bench.fidelity.folder import claim_run, read_probes
    from pic_bench.fidelity.plan import make_plan
    from pic_bench.fidelity.report import headline, write_report
    from pic_bench.fidelity.runner import run_fidelity
    from pic_bench.out_folder import print_report

    # An earlier run is deleted only once this one can begin.
    plan = make_plan(_config(args), quiet=args.quiet)
    claim_run(args.out, plan.config, resume=args.resume, force=args.force)
    try:
        with interrupt_on_sigterm():
            outcome = run_fidelity(plan, args.out, start_timeout_s=args.start_timeout, quiet=args.quiet)
    except (BenchError, KeyboardInterrupt):
        print(f"sglang-pic: what was measured stays in {args.out}; go on with --resume", file=sys.stderr)
        raise
    _tell(outcome, args.out)
    write_report(args.out)
    print_report(args.out, headline, as_json=args.json)
    if not args.check:
        return 0
    checks = check_naive(read_probes(args.out))
    for checked in checks:
        print(f"sglang-pic: {checked}", file=sys.stderr)
    # No prompt to check is a failure too: CI must not pass because nothing was measured.
    return 0 if checks and all(checked.holds for checked in checks) else EXIT_FAILED


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a look in a few minutes: few prompts, blocks and seams")
    for size in settings_of(Sizes).values():
        several = isinstance(size.default, tuple)
        text = size.description[0].lower() + size.description[1:].removesuffix(".")
        parser.add_argument(
            "--keys" if size.name == "key_prompts" else f"--{size.name.replace('_', '-')}",
            dest=size.name,
            type=_numbers if several else int,
            metavar="N,N,..." if several else "N",
            help=f"{text} (default: {_shown(size.default)}; --quick: {_shown(getattr(QUICK_SIZES, size.name))})",
        )
    retire(parser, {"--greedy": "answers are generated in qa, and in no other experiment"})


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _shown(size: int | tuple[int, ...] | None) -> str:
    if isinstance(size, tuple):
        return ",".join(map(str, size))
    return "all" if size is None else str(size)


def _config(args: argparse.Namespace) -> Config:
    chosen = [one.value for one in Experiment if not (args.quick and one in SLOW)]
    for policy in args.policy:
        parse_policy(policy)
    experiments = tuple(Experiment(name) for name in dict.fromkeys(args.experiment or chosen))
    if args.policy and not {Experiment.TRACE, Experiment.EDITS, Experiment.TURNS} & {*experiments}:
        raise ConfigError(f"--policy {args.policy[0]!r}: trace, edits and turns have policies; add --experiment trace.")
    asked = {name: getattr(args, name) for name in settings_of(Sizes)}
    sizes = QUICK_SIZES if args.quick else Sizes()
    # A run that has no use for policies can be resumed after the default ones have changed.
    policies = tuple(args.policy) or (DEFAULT_POLICIES if Experiment.TRACE in experiments else ())
    return Config(
        model=args.model,
        data=tuple(args.data),
        experiments=experiments,
        dtypes=tuple(dict.fromkeys(args.dtype or DTYPES)),
        sizes=msgspec.structs.replace(sizes, **{name: value for name, value in asked.items() if value is not None}),
        policies=policies,
        orders=tuple(dict.fromkeys(args.order or [RECORDED])),
        min_chunk_hit=args.min_chunk_hit,
        pool_tokens=args.max_total_tokens,
        edit_set=TemplateSet(args.set),
        changes=tuple(Change[name.upper()] for name in args.change or ()) or tuple(Change),
        server_args=tuple(word for text in args.server_arg for word in shlex.split(text)),
        seed=args.seed,
    )


def _tell(outcome: Outcome, folder: Path) -> None:
    resumed = f", {outcome.resumed} were there" if outcome.resumed else ""
    print(f"sglang-pic: {outcome.measured} prompts measured{resumed}", file=sys.stderr)
    if outcome.left_out:
        print(
            f"sglang-pic: warning: {outcome.left_out} prompts were not served as meant and are left out of every "
            f"arm; see {folder / 'left_out.jsonl'}",
            file=sys.stderr,
        )
