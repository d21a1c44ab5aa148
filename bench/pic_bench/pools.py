"""Checks `sglang-pic census --pool` on real servers: reuse in small KV pools, as counted and as served.

Calls are sent one at a time as token ids, without the recorded answers, and in the census's order. Nothing is left out
for its cost and nothing is audited, because the census knows neither.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
from pic_traces.encode import load_encoder
from pic_traces.encode.encoded import Encoder
from pic_traces.session import Session
from pic_traces.source import short_name
from tqdm import tqdm

from pic_bench.compare.arms import build_arms
from pic_bench.compare.server import Server
from pic_bench.report.markdown import Table
from pic_bench.serving import generate, serving
from pic_bench.study_command import Finding, Result, Study, at_least, result_of
from sglang_pic.census.inputs import read_sessions
from sglang_pic.census.outcome import Outcome
from sglang_pic.census.pools import PoolCurve
from sglang_pic.census.simulate import simulate

_CONFIG: Final = '{"cost_gate": "off", "audit_rate": 0}'
_MOST_APART: Final = 0.03


class Compared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One set in one pool: shares of prompt tokens, as the census counts them and as the server reports them."""

    trace: str
    pool: int
    calls: int
    prompt_tokens: int
    prefix_counted: float
    prefix_served: float
    spliced_counted: float
    spliced_served: float

    @property
    def apart(self) -> float:
        """The larger of the two differences."""
        return max(abs(self.prefix_counted - self.prefix_served), abs(self.spliced_counted - self.spliced_served))


class PoolsResult(Result, frozen=True, kw_only=True):
    """The result file."""

    model: str
    sessions: int
    limit_calls: int | None
    """The first calls of each set, in the order in which they are sent."""
    longest: int
    compared: list[Compared]


STUDY = Study("pools", __doc__)
STUDY.options("model", "sessions", "limit-calls")
STUDY.add("traces", nargs="+", metavar="TRACE", help="recorded calls")
STUDY.add("--pools", type=at_least(1), nargs="+", required=True, metavar="TOKENS", help="KV pools of the servers")
STUDY.add("--longest", type=at_least(1), default=4096, metavar="N", help="leave out calls with longer prompts")


@STUDY.measures
def main(args: argparse.Namespace, logs: Path) -> Finding:
    """Count each set, and send it to a server with each pool."""
    encoder = load_encoder(args.model)
    counted = {}
    for trace in args.traces:
        sessions = list(_sessions(trace, encoder, args))
        outcomes, curve = [], PoolCurve()
        served = simulate([(trace, sessions)], encoder, side_by_side=args.sessions)
        for outcome in islice(served, args.limit_calls):
            curve.observe(outcome)
            outcomes.append(outcome)
        counted[trace] = outcomes, curve
    (arm,) = build_arms(["pic"], server_args=(), pic_config=_CONFIG)
    compared = []
    for pool in args.pools:
        with serving(args.model, arm, logs, flags=("--max-total-tokens", str(pool))) as server:
            for trace, (outcomes, curve) in counted.items():
                server.post("/flush_cache", {})
                compared.append(_compare(short_name(trace), pool, outcomes, curve, server))
    result = result_of(PoolsResult, args, compared=compared)
    header = ["set", "pool", "calls", "prefix counted", "served", "spliced counted", "served"]
    rows = []
    for one in compared:
        shares = one.prefix_counted, one.prefix_served, one.spliced_counted, one.spliced_served
        rows.append([one.trace, f"{one.pool:,}", f"{one.calls:,}", *(f"{share:.1%}" for share in shares)])
    return Finding(result, Table(header, rows), exit_code=int(any(one.apart > _MOST_APART for one in compared)))


def _sessions(trace: str, encoder: Encoder, args: argparse.Namespace) -> Iterator[Session]:
    """The sessions with the calls that are sent, without their answers."""
    for session in read_sessions(trace, None):
        specs = [
            msgspec.structs.replace(spec, completion=None)
            for spec, call in zip(session.specs, session.calls(), strict=True)
            if len(encoder.encode(call).tokens) <= args.longest
        ]
        yield msgspec.structs.replace(session, specs=specs)


def _compare(trace: str, pool: int, outcomes: list[Outcome], curve: PoolCurve, server: Server) -> Compared:
    prompts = [outcome.encoded.tokens.tolist() for outcome in outcomes]
    sent = tqdm(prompts, f"{trace}, {pool:,} tokens", file=sys.stderr, mininterval=10)
    answers = [generate(server, prompt, max_new_tokens=1, with_logprobs=False) for prompt in sent]
    total = sum(map(len, prompts))
    spliced = sum(answer.spliced_tokens for answer in answers)
    prefix = sum(answer.cached_tokens for answer in answers) - spliced
    prefix_counted, spliced_counted = curve.hits(pool)
    return Compared(
        trace=trace,
        pool=pool,
        calls=len(prompts),
        prompt_tokens=total,
        prefix_counted=prefix_counted / total,
        prefix_served=prefix / total,
        spliced_counted=spliced_counted / total,
        spliced_served=spliced / total,
    )


if __name__ == "__main__":
    sys.exit(main())
