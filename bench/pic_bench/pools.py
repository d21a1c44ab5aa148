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
from pic_traces.session import Call
from pic_traces.source import short_name
from tqdm import tqdm

from pic_bench.compare.arms import build_arms
from pic_bench.compare.server import Server
from pic_bench.report.markdown import Table
from pic_bench.serving import generate, serving
from pic_bench.study_command import Finding, Result, Study, at_least, result_of
from sglang_pic.census.inputs import read_sessions
from sglang_pic.census.outcome import CallRef
from sglang_pic.census.simulate import Cache, in_turns
from sglang_pic.core import CoreConfig

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
    """Send each set to a server with each pool, and count it."""
    encoder = load_encoder(args.model)
    calls = {trace: list(_calls(trace, encoder, args)) for trace in args.traces}
    (arm,) = build_arms(["pic"], server_args=(), pic_config=_CONFIG)
    compared = []
    for pool in args.pools:
        with serving(args.model, arm, logs, flags=("--max-total-tokens", str(pool))) as server:
            for trace, sent in calls.items():
                server.post("/flush_cache", {})
                compared.append(_compare(trace, pool, sent, encoder, server))
    result = result_of(PoolsResult, args, compared=compared)
    header = ["set", "pool", "calls", "prefix counted", "served", "spliced counted", "served"]
    rows = []
    for one in compared:
        shares = one.prefix_counted, one.prefix_served, one.spliced_counted, one.spliced_served
        rows.append([one.trace, f"{one.pool:,}", f"{one.calls:,}", *(f"{share:.1%}" for share in shares)])
    return Finding(result, Table(header, rows), exit_code=int(any(one.apart > _MOST_APART for one in compared)))


def _calls(trace: str, encoder: Encoder, args: argparse.Namespace) -> Iterator[Call]:
    """The calls in their order, without their answers."""
    sessions = []
    for session in read_sessions(trace, None):
        specs = [
            msgspec.structs.replace(spec, completion=None)
            for spec, call in zip(session.specs, session.calls(), strict=True)
            if len(encoder.encode(call).tokens) <= args.longest
        ]
        sessions.append(msgspec.structs.replace(session, specs=specs))
    return islice(in_turns(sessions, args.sessions), args.limit_calls)


def _compare(trace: str, pool: int, calls: list[Call], encoder: Encoder, server: Server) -> Compared:
    cache = Cache(CoreConfig(), encoder, pool=pool)
    prompt = prefix = spliced = prefix_served = spliced_served = 0
    for number, call in enumerate(tqdm(calls, f"{short_name(trace)}, {pool:,}", file=sys.stderr, mininterval=30)):
        encoded = encoder.encode(call)
        outcome = cache.serve(CallRef(number, trace, call.session_id, call.index), call.agent, encoded)
        answer = generate(server, encoded.tokens.tolist(), max_new_tokens=1, with_logprobs=False)
        prompt += len(encoded.tokens)
        prefix += outcome.prefix_len
        spliced += outcome.num_chunk_hit
        prefix_served += answer.cached_tokens - answer.spliced_tokens
        spliced_served += answer.spliced_tokens
    return Compared(
        trace=short_name(trace),
        pool=pool,
        calls=len(calls),
        prompt_tokens=prompt,
        prefix_counted=prefix / prompt,
        prefix_served=prefix_served / prompt,
        spliced_counted=spliced / prompt,
        spliced_served=spliced_served / prompt,
    )


if __name__ == "__main__":
    sys.exit(main())
