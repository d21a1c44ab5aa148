"""The command line of the soak."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pic_bench.compare.command import with_servers
from pic_bench.out_folder import write_json
from pic_bench.soak.record import Soak
from pic_bench.soak.soak import Settings, soak

_DESCRIPTION = """\
Serves recorded and generated sessions on a patched server whose KV pool is far too small for them, for minutes.

Requests are aborted, clients go away in the middle of a stream, options are wrong, prompts are pinned and dropped, the
cache is flushed, requests are retracted and rows evicted all the time. After each round of sessions the server comes to
rest, and every slot, lock and index entry is accounted for. Every row that is spliced or read is compared with a table
of what was computed where. Answers of requests with mode off are compared with those of a stock server in float32.
Before all that two faults are made on purpose, which the checkers must find.
"""
_EPILOG = """\
The last line on stdout is one JSON object of counts. Exit code: 0 where mismatches, leaks, stale_rows and failures are
0 and the controls were found, 1 otherwise or where a server ended, 130 interrupted.

examples:
  python -m pic_bench.soak --model .models/tiny-gqa --seconds 60
  python -m pic_bench.soak --model .models/tiny-mla --seconds 600 --seed 7 --out soak.json
  python -m pic_bench.soak --model .models/tiny-gqa --page-size 16 --pool-tokens 2000 --logs runs/soak
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a soak and print its counts."""
    args = _parse(argv)

    def run(scratch: Path) -> int:
        result = soak(_settings(args, scratch), lambda so_far: _keep(args.out, so_far))
        _keep(args.out, result)
        print(msgspec.json.encode(result).decode())
        return 0 if result.is_clean else 1

    return with_servers("soak", run)


def _keep(path: Path | None, result: Soak) -> None:
    if path is not None:
        write_json(path, result)


def _settings(args: argparse.Namespace, scratch: Path) -> Settings:
    return Settings(
        model=args.model,
        seconds=args.seconds,
        seed=args.seed,
        page_size=args.page_size,
        pool_tokens=args.pool_tokens,
        side_by_side=args.sessions,
        server_args=_words(args.server_arg),
        patched_args=_words(args.patched_arg),
        logs=args.logs or scratch,
        quiet=args.quiet,
    )


def _words(texts: Sequence[str]) -> list[str]:
    return [word for text in texts for word in shlex.split(text)]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pic_bench.soak",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="model folder; a tiny one gives many requests")
    add("--seconds", type=float, default=600.0, metavar="S", help="how long requests are sent (default: 600)")
    add("--seed", type=int, default=0, help="of the sessions, options and faults (default: 0)")
    add("--sessions", type=int, default=10, metavar="N", help="sessions side by side (default: 10)")
    add("--pool-tokens", type=int, default=1400, metavar="N", help="KV pool of the patched server (default: 1400)")
    add("--page-size", type=int, choices=(1, 16), default=1, help="tokens of a page (default: 1)")
    add("--server-arg", action="append", default=[], metavar="ARGS", help="more flags for both servers")
    add("--patched-arg", action="append", default=[], metavar="ARGS", help="more flags for the patched server alone")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the counts there, too, indented, and those so far after each round",
    )
    add("--logs", type=Path, metavar="DIR", help="keep the servers' logs there")
    add("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    if args.seconds <= 0 or args.sessions < 1:
        parser.error(f"--seconds {args.seconds:g}, --sessions {args.sessions}: must be more than 0.")
    if args.pool_tokens < 1000:
        parser.error(
            f"--pool-tokens {args.pool_tokens}: must be 1000 or more, for the longest prompts have 420 tokens."
        )
    return args
