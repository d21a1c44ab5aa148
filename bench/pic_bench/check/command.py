"""The verb `check`: does a running server answer from its cache as it does without it?"""

from __future__ import annotations

import argparse

import msgspec
from pic_replay.client import Endpoint
from pic_replay.command import add_request_arguments, json_object
from pic_replay.options import ReplayOptions
from pic_traces.errors import TraceError
from pic_traces.source import TRACE_HELP, limit, load

from pic_bench.check.judging import judge, sentences, table_of
from pic_bench.check.sending import Sender
from pic_bench.report.markdown import markdown_table
from pic_bench.study_command import OPTIONS, add_options
from sglang_pic.arguments import API_KEY, api_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic check`."""
    parser.add_argument("base_url", metavar="URL", help="the server, e.g. http://127.0.0.1:30000")
    told = f"{TRACE_HELP} (default: %(default)s)"
    parser.add_argument("trace", nargs="?", default="sample:opendevin", metavar="TRACE", help=told)
    parser.add_argument(
        "--limit-calls", type=int, default=12, metavar="N", help="only the first N calls of the trace (default: 12)"
    )
    add_options(parser, OPTIONS, "limit-sessions", "max-tokens")
    add_request_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print every pair as JSON instead of the table")
    parser.epilog = f"environment:\n  {API_KEY}  the server's --api-key"


def run(args: argparse.Namespace) -> int:
    """Send the prompts and print what was found; 0 if no cached answer differs beyond noise, else 1.

    Raises:
        OptionError: an argument is not allowed.
        TraceError: the trace cannot be read.
        ReplayError: the server refused requests, caches nothing, or cannot be reached.
    """
    names = ("trace", "base_url", "limit_sessions", "limit_calls", "max_tokens", "timeout_s")
    options = ReplayOptions(
        **{name: getattr(args, name) for name in names}, out="", extra_body=json_object("--extra-body", args.extra_body)
    ).check()
    sessions = limit(load(args.trace), num_sessions=args.limit_sessions, num_calls=args.limit_calls)
    calls = [call for session in sessions for call in session.calls()]
    if not calls:
        raise TraceError(f"{args.trace}: has no call to send; name another trace.")
    endpoint = Endpoint(args.base_url, timeout_s=args.timeout_s, api_key=api_key())
    sender = Sender(
        endpoint, args.base_url, calls, model=args.model, max_tokens=args.max_tokens, extra_body=options.extra_body
    )
    found = judge(sender, sender.send_all(calls), base_url=args.base_url, trace=args.trace, max_tokens=args.max_tokens)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print("\n".join([markdown_table(table_of(found)), "", *sentences(found)]))
    return 1 if found.wrong else 0
