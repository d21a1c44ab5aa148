"""Serves sessions on a patched server whose KV pool is far too small, with faults, and accounts for everything.

Recorded and generated sessions are played for minutes. Requests are aborted, clients go away in the middle of a stream,
options are wrong, prompts are pinned and dropped, the cache is flushed, requests are retracted and rows evicted all the
time. After each round of sessions the server comes to rest, and every slot, lock and index entry is accounted for.
Every row that is spliced or read is compared with a table of what was computed where. Answers of requests with mode off
are compared with those of a stock server in float32. Before all that two faults are made on purpose, which the checkers
must find.

The last line on stdout is one JSON object of counts. Exit code: 0 where mismatches, leaks, stale_rows and failures are
0 and the controls were found, 1 otherwise or where a server ended, 130 interrupted.

examples:
  python -m pic_bench.soak --model .models/tiny-gqa --seconds 60
  python -m pic_bench.soak --model .models/tiny-mla --seconds 600 --seed 7 --out soak.json
  python -m pic_bench.soak --model .models/tiny-gqa --page-size 16 --pool-tokens 2000 --logs runs/soak
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import msgspec

from pic_bench.frame import Finding, Study, at_least, keep
from pic_bench.soak.soak import soak

STUDY = Study("soak", __doc__, seed=0)
STUDY.add("--model", required=True, metavar="DIR", help="model folder; a tiny one gives many requests")
STUDY.add("--seconds", type=at_least(0.1), default=600.0, metavar="S", help="how long requests are sent")
STUDY.add("--sessions", type=at_least(1), default=10, metavar="N", help="sessions side by side")
STUDY.add(
    "--pool-tokens", type=at_least(1000), default=1400, metavar="N", help="KV pool; prompts have up to 420 tokens"
)
STUDY.add("--page-size", type=int, choices=(1, 16), default=1, help="tokens of a page")
STUDY.add("--server-arg", action="append", default=[], metavar="ARGS", help="more flags for both servers")
STUDY.add("--patched-arg", action="append", default=[], metavar="ARGS", help="more flags for the patched server alone")
STUDY.add("--logs", type=Path, metavar="DIR", help="keep the servers' logs there")
STUDY.add("--quiet", action="store_true", help="no progress bar")


@STUDY.measures
def main(args: argparse.Namespace, scratch: Path) -> Finding:
    """Run a soak; the counts so far are kept after each round."""
    args.logs = args.logs or scratch
    result = soak(args, partial(keep, args))
    return Finding(result, msgspec.json.encode(result).decode(), 0 if result.is_clean else 1)


if __name__ == "__main__":
    sys.exit(main())
