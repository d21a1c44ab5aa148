"""The verb `export`: writes traces and runs in the forms that other tools read.

- `mooncake`: Mooncake's traces, a request a line with the ids of its blocks (`hash_ids`), which AIPerf and guidellm
  replay with text of their own.
- `messages`: the same lines with the recorded messages in the place of lengths and ids, as AIPerf replays agents.
- `aiperf`: the requests of a run as AIPerf's `profile_export.jsonl`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec
from pic_traces.custom import add_reader_argument, use_reader
from pic_traces.encode import load_encoder
from pic_traces.errors import OptionError
from pic_traces.session import Session
from pic_traces.source import TRACE_HELP, load

from pic_replay.pace import Pace
from pic_replay.records import RequestRecord, Status, load_records
from sglang_pic.output import output_path, write_whole

BLOCK_TOKENS = 512
"""Mooncake's."""
_FORMS = ("mooncake", "messages", "aiperf")
Row = dict[str, Any]
"""A line of another tool's format; its keys are that tool's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic export`."""
    parser.add_argument("source", metavar="TRACE|RUN", help=f"{TRACE_HELP}; with --to aiperf a folder of a replay")
    add_reader_argument(parser)
    parser.add_argument("--to", required=True, choices=_FORMS, help="the form to write")
    parser.add_argument("--out", required=True, metavar="FILE", help="the JSONL file to write, or - for stdout")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="a model's tokenizer and template; without one lengths are approximate"
    )
    parser.add_argument("--limit-sessions", type=int, metavar="N", help="only the first N sessions of the trace")
    parser.add_argument(
        "--spread-s", type=float, default=0.0, metavar="S", help="start sessions at random moments within S seconds"
    )
    parser.add_argument("--pause-s", type=float, default=0.0, metavar="S", help="mean pause between a session's calls")


def run(args: argparse.Namespace) -> int:
    """Write the file.

    Returns:
        0.

    Raises:
        ConfigError: the file exists, or cannot be written there.
        OptionError: the source does not fit the form.
        TraceError: the trace, the run or the tokenizer cannot be read.
    """
    out = None if args.out == "-" else output_path(args.out, "JSONL file", is_forced=args.force)
    if args.limit_sessions is not None and args.limit_sessions < 1:
        raise OptionError(f"--limit-sessions={args.limit_sessions}: must be 1 or more; leave it out for all sessions.")
    use_reader(args.reader)
    if args.to == "aiperf":
        if not Path(args.source).is_dir():
            raise OptionError(f"--to aiperf: {args.source!r} is no folder; give a run's with requests.jsonl.")
        rows = aiperf_rows(load_records(Path(args.source)))
    else:
        sessions = islice(load(args.source), args.limit_sessions)
        pace = Pace(args.spread_s, args.pause_s)
        rows = (mooncake_rows if args.to == "mooncake" else message_rows)(sessions, pace, args.tokenizer)
    counter = count()
    lines = (msgspec.json.encode(row) + b"\n" for row, _ in zip(rows, counter, strict=False))
    if out is None:
        sys.stdout.writelines(map(bytes.decode, lines))
    else:
        write_whole(out, lines)
    print(f"{out or 'stdout'}: {next(counter):,} lines", file=sys.stderr)
    return 0


def mooncake_rows(
    sessions: Iterable[Session], pace: Pace, tokenizer: str | None, block_tokens: int = BLOCK_TOKENS
) -> Iterator[Row]:
    """A line for every call.

    Two calls have an id in common where they have the block and everything before it in common. Ids count from 0 in the
    order in which blocks appear. A prompt's last block may be short.

    Args:
        pace: when sessions start, and how long they pause; recorded sessions say neither.
        tokenizer: a model's folder; None counts tokens by a stand-in.
    """
    encoder = load_encoder(tokenizer)
    known: dict[tuple[int, bytes], int] = {}
    for session in sessions:
        for call, when in zip(session.calls(), _times(session, pace), strict=True):
            encoded = encoder.encode(call)
            tokens = encoded.tokens
            ids: list[int] = []
            for start in range(0, len(tokens), block_tokens):
                block = (ids[-1] if ids else -1, tokens[start : start + block_tokens].tobytes())
                ids.append(known.setdefault(block, len(known)))
            lengths = {"input_length": len(tokens), "output_length": max(1, len(encoded.path) - len(tokens))}
            yield {"session_id": session.session_id, **when, **lengths, "hash_ids": ids}


def message_rows(sessions: Iterable[Session], pace: Pace, tokenizer: str | None) -> Iterator[Row]:
    """A line for every call, with its messages and tools as they were recorded.

    Args:
        pace: as in `mooncake_rows`.
        tokenizer: counts the recorded answers' tokens; None leaves lengths out.
    """
    encoder = None if tokenizer is None else load_encoder(tokenizer)
    for session in sessions:
        for call, when in zip(session.calls(), _times(session, pace), strict=True):
            row: Row = {"session_id": session.session_id, **when, "messages": call.messages}
            if call.tools:
                row["tools"] = call.tools
            if encoder is not None:
                encoded = encoder.encode(call)
                row["output_length"] = max(1, len(encoded.path) - len(encoded.tokens))
            yield row


def _times(session: Session, pace: Pace) -> Iterator[Row]:
    """When a session's calls are sent, in milliseconds: the first at a moment, each further one after a delay."""
    for number, seconds in enumerate(pace.times(session)):
        yield {"delay" if number else "timestamp": round(1000 * seconds)}


def aiperf_rows(records: Iterable[RequestRecord]) -> Iterator[Row]:
    """A line for every request that was sent; times count from the start of the replay, in nanoseconds."""
    sessions: dict[str, int] = {}
    for record in records:
        if record.sent_at is None or record.status is Status.SKIPPED:
            continue
        is_ok = record.status is Status.OK
        yield {
            "metadata": {
                "session_num": sessions.setdefault(record.session_id, len(sessions)),
                "x_request_id": record.request_id,
                "conversation_id": record.session_id,
                "turn_index": record.call,
                "request_start_ns": _ns(record.sent_at),
                "request_end_ns": _ns(record.finished_at),
                "worker_id": "sglang-pic",
                "record_processor_id": "sglang-pic",
                "benchmark_phase": "warmup" if record.warmup else "profiling",
                "was_cancelled": record.status is Status.INTERRUPTED,
            },
            "metrics": _metrics(record) if is_ok else {},
            "error": None if is_ok else _error(record),
        }


def _metrics(record: RequestRecord) -> Row:
    """The metrics under AIPerf's names, without those that were not measured."""
    ttft, e2e, output = record.ttft_s, record.e2e_s, record.output_tokens
    between = None if ttft is None or e2e is None or not output or output < 2 else (e2e - ttft) / (output - 1)
    values = {
        "input_sequence_length": (record.prompt_tokens, "tokens"),
        "output_sequence_length": (output, "tokens"),
        "time_to_first_token": (None if ttft is None else 1000 * ttft, "ms"),
        "request_latency": (None if e2e is None else 1000 * e2e, "ms"),
        "inter_token_latency": (None if between is None else 1000 * between, "ms"),
        "output_token_throughput_per_user": (1 / between if between else None, "tokens/sec/user"),
    }
    return {name: {"value": value, "unit": unit} for name, (value, unit) in values.items() if value is not None}


def _error(record: RequestRecord) -> Row:
    return {"code": record.http_status, "type": record.status.value, "message": record.error or "interrupted"}


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
