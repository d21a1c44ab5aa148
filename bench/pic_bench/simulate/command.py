"""The verb `simulate`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import math
import sys

import msgspec
from pic_replay.pace import Pace
from pic_traces.encode import load_encoder
from tqdm import tqdm

from pic_bench.simulate.lasting import LEAST_WINDOWS, Lasting, Setup, simulate_lasting
from sglang_pic.census.inputs import (
    add_input_arguments,
    add_policy_arguments,
    check_inputs,
    policy_of,
    read_sessions,
)
from sglang_pic.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic simulate`."""
    add_input_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the counts as JSON instead of tables")
    parser.add_argument(
        "--hours", type=float, required=True, metavar="H", help="start sessions at random moments within H hours"
    )
    parser.add_argument("--windows", type=float, default=10.0, metavar="MINUTES", help="window length (default: 10)")
    parser.add_argument(
        "--pool-share",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="size of the pool, as a share of the tokens that a cache without limit holds in the end (default: 0.1)",
    )
    parser.add_argument(
        "--host-share",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="size of the host's memory for rows (HiCache), likewise; what it serves beyond the pool is told apart "
        "(default: none)",
    )
    parser.add_argument(
        "--servers",
        type=int,
        default=1,
        metavar="N",
        help="servers, each with a pool and a host of that size; every call goes to one of them by chance (default: 1)",
    )
    parser.add_argument(
        "--store",
        action="store_true",
        help="let the servers share a store without limit (HiCache's); what it serves beyond pool and host is told "
        "apart",
    )
    parser.add_argument(
        "--pause-s", type=float, default=15.0, metavar="S", help="mean pause between a session's calls (default: 15)"
    )
    parser.add_argument("--pace-seed", type=int, default=1, metavar="N", help="seed of starts and pauses (default: 1)")
    add_policy_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate, print, and return 0.

    Raises:
        ConfigError: a value is not allowed.
        TraceError: a file or the tokenizer cannot be read.
    """
    # What prints tables is slow to import; `--help` does without.
    from pic_bench.simulate.table import render

    check_inputs(args)
    setup = _setup_of(args)
    sessions = [(file, session) for file in args.files for session in read_sessions(file, args.limit_sessions)]
    num_calls = sum(session.num_calls for _, session in sessions)
    services = simulate_lasting(sessions, load_encoder(args.tokenizer), policy_of(args), setup)
    is_hidden = args.quiet or not sys.stderr.isatty()
    # Every call is served by each cache, with a store by stock SGLang too.
    num_services = 2 + bool(setup.host_share) + 2 * setup.has_store
    *_, result = tqdm(services, total=num_services * num_calls, unit="call", file=sys.stderr, disable=is_hidden)
    assert isinstance(result, Lasting), "the result comes last"
    print(msgspec.json.format(msgspec.json.encode(result)).decode() if args.json else render(result))
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
    pace = Pace(args.hours * 3600, args.pause_s, args.pace_seed)
    return Setup(pace, args.windows * 60, args.pool_share, args.host_share, args.servers, args.store)
