"""The verb `replay` of the command line: its arguments and its output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from pic_traces.custom import add_reader_argument
from pic_traces.errors import OptionError
from pic_traces.session import JsonValue
from pic_traces.source import TRACE_HELP

from pic_replay.launch import run_replay
from pic_replay.options import ReplayOptions
from pic_replay.records import Latency, ReplaySummary, load_summary
from sglang_pic.arguments import API_KEY, api_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the replay's arguments to a parser."""
    parser.add_argument("trace", metavar="TRACE", help=TRACE_HELP)
    add_reader_argument(parser)
    parser.add_argument("--base-url", required=True, metavar="URL", help="the server, e.g. http://127.0.0.1:30000")
    parser.add_argument("--out", required=True, metavar="DIR", help="run folder to write")
    parser.add_argument("--sessions", type=int, default=1, metavar="N", help="sessions side by side (default: 1)")
    parser.add_argument("--limit-sessions", type=int, metavar="N", help="only the first N sessions of the trace")
    parser.add_argument("--limit-calls", type=int, metavar="N", help="only the first N calls of the trace")
    parser.add_argument("--max-tokens", type=int, default=16, metavar="N", help="output tokens a call (default: 16)")
    add_request_arguments(parser)
    parser.add_argument(
        "--custom-params", metavar="JSON", help='SGLang\'s custom_params, e.g. \'{"pic": {"mode": "off"}}\''
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        nargs="?",
        const=20,
        default=0,
        metavar="K",
        help="record the first token's distribution over K tokens (20 if no K is given; default: off)",
    )
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="unrelated requests first (default: 1)")
    parser.add_argument("--force", action="store_true", help="replace the run that the folder has")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.epilog = f"environment:\n  {API_KEY}  the server's --api-key; never recorded"


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every request to a server is sent with."""
    parser.add_argument("--model", metavar="NAME", help="model name to send (default: the server's first)")
    parser.add_argument("--extra-body", metavar="JSON", help="merged into every request body; overrides other fields")
    parser.add_argument("--timeout-s", type=float, default=600.0, metavar="S", help="longest silence (default: 600)")


def options_from(args: argparse.Namespace) -> ReplayOptions:
    """The options that parsed arguments ask for.

    Raises:
        OptionError: a value is not allowed.
    """
    given = {name: value for name, value in vars(args).items() if name in ReplayOptions.__struct_fields__}
    given["extra_body"] = json_object("--extra-body", args.extra_body)
    given["custom_params"] = json_object("--custom-params", args.custom_params)
    given["api_key"] = api_key()
    return ReplayOptions(**given).check()


def json_object(flag: str, text: str | None) -> dict[str, JsonValue]:
    """The object that a flag's JSON is; empty without the flag.

    Raises:
        OptionError: it is no JSON object.
    """
    if text is None:
        return {}
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise OptionError(f"{flag}={text!r}: is not JSON ({error}); an object is expected.") from error
    if not isinstance(value, dict):
        raise OptionError(f"{flag}={text!r}: is {type(value).__name__}; a JSON object is expected.")
    return value


def run(args: argparse.Namespace) -> int:
    """Replay, and print the summary; 0 when every call was answered, else 1.

    Raises:
        OptionError: an argument is not allowed, or the folder cannot be used.
        TraceError: the trace cannot be read.
        ReplayError: the server or the replay failed.
        KeyboardInterrupt: the records so far stay in the folder.
    """
    options = options_from(args)
    try:
        summary = load_summary(run_replay(options))
    except KeyboardInterrupt:
        print(f"sglang-pic: the records so far are in {args.out}", file=sys.stderr)
        raise
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(summary)).decode())
    else:
        print(_render(summary, Path(args.out)))
    if summary.stopped:
        print(f"sglang-pic: stopped early: {summary.stopped}", file=sys.stderr)
    return 1 if summary.failed or summary.stopped else 0


def _render(summary: ReplaySummary, out: Path) -> str:
    calls = f"{summary.completed} of {summary.planned}, {summary.failed} failed, {summary.skipped} skipped (too long)"
    rate = f"{summary.achieved_requests_per_s:.2f} calls/s, {summary.achieved_prompt_tokens_per_s:,.0f} prompt tokens/s"
    rows = [
        ("calls", calls),
        ("prompt tokens", f"{summary.prompt_tokens:,}"),
        ("  prefix hit", _share(summary.prefix_hit_tokens, summary.prompt_tokens)),
        ("  spliced", _share(summary.chunk_hit_tokens, summary.prompt_tokens)),
        ("  computed", _share(summary.computed_tokens, summary.prompt_tokens)),
        ("output tokens", f"{summary.output_tokens:,}"),
        ("time to first token", _latency(summary.ttft_s)),
        ("end to end", _latency(summary.e2e_s)),
        ("schedule delay", _latency(summary.schedule_delay_s)),
        ("achieved", rate),
        ("wall", f"{summary.wall_s:.1f} s"),
        ("run folder", str(out)),
    ]
    if summary.tools_flattened:
        rows.append(("tools", "sent as plain text: the chat template does not show them"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _share(tokens: int | None, total: int) -> str:
    if tokens is None:
        return "not reported by the server (start it with --enable-cache-report)"
    return f"{tokens:,} ({tokens / total:.1%})" if total else f"{tokens:,}"


def _latency(latency: Latency) -> str:
    if latency.mean is None or latency.p50 is None or latency.p90 is None or latency.p99 is None:
        return "-"
    return f"mean {latency.mean:.3f} s, p50 {latency.p50:.3f}, p90 {latency.p90:.3f}, p99 {latency.p99:.3f}"
