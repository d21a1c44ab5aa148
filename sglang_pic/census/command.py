"""The verb `census`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import math
import sys

import msgspec
from pic_traces.encode import load_encoder
from pic_traces.pace import Pace
from pic_traces.source import TRACE_HELP
from tqdm import tqdm

from sglang_pic.census.inputs import (
    add_input_arguments,
    add_policy_arguments,
    check_inputs,
    policy_of,
    read_sessions,
    with_progress,
)
from sglang_pic.census.lasting import LEAST_WINDOWS, Lasting, Setup, simulate_lasting
from sglang_pic.census.simulate import CacheScope
from sglang_pic.census.survey import Survey
from sglang_pic.census.windows import WindowSearch
from sglang_pic.core import CoreConfig
from sglang_pic.errors import ConfigError


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
    _add_lasting_arguments(parser)
    add_policy_arguments(parser)


def _add_lasting_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "does the gain last?", "sessions side by side in simulated time, in a pool that is too small for them"
    )
    group.add_argument("--hours", type=float, metavar="H", help="start sessions at random moments within H hours")
    group.add_argument("--windows", type=float, default=10.0, metavar="MINUTES", help="window length (default: 10)")
    group.add_argument(
        "--pool-share",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="size of the pool, as a share of the tokens that a cache without limit holds in the end (default: 0.1)",
    )
    group.add_argument(
        "--host-share",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="size of the host's memory for rows (HiCache), likewise; what it serves beyond the pool is told apart "
        "(default: none)",
    )
    group.add_argument(
        "--servers",
        type=int,
        default=1,
        metavar="N",
        help="servers, each with a pool and a host of that size; every call goes to one of them by chance (default: 1)",
    )
    group.add_argument(
        "--store",
        action="store_true",
        help="let the servers share a store without limit (HiCache's); what it serves beyond pool and host is told "
        "apart",
    )
    group.add_argument(
        "--pause-s", type=float, default=15.0, metavar="S", help="mean pause between a session's calls (default: 15)"
    )
    group.add_argument("--pace-seed", type=int, default=1, metavar="N", help="seed of starts and pauses (default: 1)")


def run(args: argparse.Namespace) -> int:
    """Count, print, and return 0.

    If the count ends early, what was counted before is still printed.

    Raises:
        ConfigError: a value is not allowed.
        TraceError: a file or the tokenizer cannot be read.
        KeyboardInterrupt: the count was interrupted.
    """
    # Installed with the extra `census`; `--help` must work without.
    from sglang_pic.census.table import render

    check_inputs(args)
    config = policy_of(args)
    if args.hours is not None:
        return _run_lasting(args, config)
    survey = Survey(
        args.files,
        encoder=load_encoder(args.tokenizer),
        config=config,
        scope=CacheScope.ALL if args.shared_cache else CacheScope.FILE,
        limit_sessions=args.limit_sessions,
        make_search=WindowSearch if args.upper_bound else None,
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


def _run_lasting(args: argparse.Namespace, config: CoreConfig) -> int:
    from sglang_pic.census.table import render_lasting

    setup = _setup_of(args)
    sessions = [(file, session) for file in args.files for session in read_sessions(file, args.limit_sessions)]
    num_calls = sum(session.num_calls for _, session in sessions)
    services = simulate_lasting(sessions, load_encoder(args.tokenizer), config, setup)
    is_hidden = args.quiet or not sys.stderr.isatty()
    # Every call is served by each cache, with a store by stock SGLang too.
    num_services = 2 + bool(setup.host_share) + 2 * setup.has_store
    *_, result = tqdm(services, total=num_services * num_calls, unit="call", file=sys.stderr, disable=is_hidden)
    assert isinstance(result, Lasting), "the result comes last"
    print(msgspec.json.format(msgspec.json.encode(result)).decode() if args.json else render_lasting(result))
    return 0


def _setup_of(args: argparse.Namespace) -> Setup:
    """What the arguments say.

    Raises:
        ConfigError: a value is not allowed.
    """
    for flag, value in (("--hours", args.hours), ("--windows", args.windows)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{flag}={value!r}: must be more than 0.")
    if not 0 < args.pool_share <= 1:
        raise ConfigError(f"--pool-share={args.pool_share!r}: must be more than 0 and at most 1.")
    if args.host_share and not args.pool_share <= args.host_share <= 1:
        raise ConfigError(
            f"--host-share={args.host_share!r}: must be at least --pool-share={args.pool_share!r} and at most 1, or 0."
        )
    if args.servers < 1:
        raise ConfigError(f"--servers={args.servers!r}: must be 1 or more; 1 is the default.")
    if not 0 <= args.pause_s < math.inf:
        raise ConfigError(f"--pause-s={args.pause_s!r}: must be 0 or more seconds.")
    if args.hours * 60 < LEAST_WINDOWS * args.windows:
        raise ConfigError(
            f"--hours={args.hours!r}: must hold {LEAST_WINDOWS} or more windows of {args.windows:g} minutes; "
            "make --windows smaller."
        )
    if args.upper_bound or args.shared_cache:
        raise ConfigError("--upper-bound and --shared-cache have no meaning with --hours; leave them out.")
    pace = Pace(args.hours * 3600, args.pause_s, args.pace_seed)
    return Setup(pace, args.windows * 60, args.pool_share, args.host_share, args.servers, args.store)
