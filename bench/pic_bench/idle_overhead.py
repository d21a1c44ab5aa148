"""What does the plugin cost a call of which nothing can be spliced?

Starts of a server differ by more than the plugin could cost, so the same calls are compared in two ways in one run.
Every round starts, one after the other, a stock server (`stock`), a patched one whose requests all have `mode: off`
(`off`), a patched one with the defaults (`auto`), and a patched one where every call comes once in either mode
(`off+auto`), each mode in a namespace of its own, in the order off, auto, auto, off, and so on.

    on one server    the ratio of neighbouring calls of the alternating server: what `auto` costs
    between starts   the ratio of the same call on two servers of a round: what it seems to cost, with luck of the start
    start to start   the same arm in one round and the next: the luck of the start alone

A ratio is the median over calls, and its interval is over starts. Only calls count of which every server took as many
tokens from its cache: a call of which something was spliced is left out for all. With `--sessions N` a turn is a call
of each of N clients side by side.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
from pic_traces.encode import load_encoder
from pic_traces.source import TRACE_HELP, load
from tqdm import tqdm

from pic_bench.compare.arms import build_arms
from pic_bench.frame import Finding, Result, Study, at_least, keep, result_of
from pic_bench.report.markdown import Table, markdown_table
from pic_bench.report.numbers import with_interval
from pic_bench.report.stats import Estimate, Statistic, bootstrap
from pic_bench.serving import FirstToken, first_token, serving
from sglang_pic.errors import BenchError

MODES = {"stock": None, "off": {"mode": "off"}, "auto": None}
ARMS = ("stock", "off", "auto", "off+auto")
HEADLINE = "auto / off, on one server"
_WARMUP_TOKENS = 512
# Below lie the special tokens of the usual vocabularies.
_FIRST_ID, _LAST_ID = 1_000, 30_000
Prompt = list[int]


class Turn(NamedTuple):
    """One call of every client, side by side, in one mode."""

    ttft_s: list[float]
    elapsed_s: float
    cpu_s: float
    """Processor time of the server's processes, which other work on the machine changes least."""
    cached_tokens: tuple[int, ...] = ()


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One start of an arm's server: the same turns in each of its modes."""

    arm: str = ""
    round: int = 0
    turns: dict[str, list[Turn]] = {}


class Comparison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One mode over another: medians over starts of medians over turns."""

    name: str
    ttft: Estimate
    rate: Estimate
    """Of requests per second."""
    cpu: Estimate
    ttft_by_start: list[float]


class IdleOverhead(Result, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The result file. Before version 7 two servers ran side by side: those records have fields that are not read."""

    schema_version: int = 7
    model: str
    trace: str = ""
    seed: int
    repeats: int
    pairs: int
    warmup_pairs: int
    sessions: int
    counted: list[int] = msgspec.field(default_factory=list)
    """Numbers of the turns that count."""
    comparisons: list[Comparison] = msgspec.field(default_factory=list)
    target_ttft_ratio: float = 1.01
    target_rate_ratio: float = 0.99
    starts: list[Start]
    server_args: dict[str, list[str]]

    @property
    def within_target(self) -> bool:
        """Whether neither ratio of the headline, or of what stands in its place, is worse than its target."""
        found = next((each for each in self.comparisons if each.name == HEADLINE), self.comparisons[0])
        return found.ttft.value <= self.target_ttft_ratio and found.rate.value >= self.target_rate_ratio


STUDY = Study("idle_overhead", __doc__, seed=0)
STUDY.options("model", "sessions", "server-arg")
STUDY.add(
    "--trace", default="sample:opendevin", help=f"{TRACE_HELP}; gen:random?prompt=512&sessions=40 repeats nothing"
)
STUDY.add("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="started in every round (default: all)")
STUDY.add("--repeats", type=at_least(1), default=5, metavar="N", help="rounds: starts of every arm")
STUDY.add("--pairs", type=at_least(2), default=30, metavar="N", help="most turns of each mode in a start")
STUDY.add("--warmup-pairs", type=at_least(0), default=4, metavar="N", help="random prompts first, not counted")
STUDY.add("--max-total-tokens", type=int, default=65_536, metavar="N", help="KV pool of each server")


@STUDY.measures
def main(args: argparse.Namespace, logs: Path) -> Finding:
    """Measure all rounds; 1 above the target or where a server failed."""
    turns = prompts_of(args.trace, args.model, args.sessions, args.pairs)
    starts: list[Start] = []
    for number in range(args.repeats):
        # Every second round the other way round, so that drift of the machine meets all arms alike.
        for arm in args.arms[:: -1 if number % 2 else 1]:
            with _server(args, arm, logs) as sides:
                rng = np.random.default_rng(args.seed + number)
                fresh = rng.integers(_FIRST_ID, _LAST_ID, (args.warmup_pairs, args.sessions, _WARMUP_TOKENS)).tolist()
                take_turns(sides, fresh)
                starts.append(Start(arm=arm, round=number, turns=take_turns(sides, turns, f"round {number}, {arm}")))
        result = summarize(args, starts, len(turns))
        keep(args, result)
    return Finding(result, _shown(result), 0 if result.within_target else 1)


def prompts_of(trace: str, model: str, clients: int, most: int) -> list[list[Prompt]]:
    """Turns of a prompt of each client; a client has every so-many-th session of the trace, call after call."""
    encoder = load_encoder(model)
    calls: list[list[Prompt]] = [[] for _ in range(clients)]
    for number, session in enumerate(load(trace)):
        calls[number % clients] += [encoder.encode(call).tokens.tolist() for call in session.calls()]
    turns = [list(turn) for turn in zip(*calls, strict=False)][:most]
    if len(turns) < 2:
        raise BenchError(f"--trace {trace!r}: too few calls for {clients} clients; two of each are the least.")
    return turns


class Side(NamedTuple):
    """Where the turns of one mode go."""

    mode: str
    ask: Callable[[Prompt], FirstToken]
    cpu_s: Callable[[], float]


def take_turns(sides: Sequence[Side], turns: Sequence[list[Prompt]], what: str | None = None) -> dict[str, list[Turn]]:
    """Every turn on every side; the order of the sides changes from turn to turn.

    Raises:
        BenchError: a server refused a request or broke off.
    """
    taken: dict[str, list[Turn]] = {side.mode: [] for side in sides}
    with ThreadPoolExecutor(max(map(len, turns), default=1)) as clients:
        for number, prompts in enumerate(tqdm(turns, what, file=sys.stderr, disable=what is None, mininterval=10)):
            for side in sides[:: -1 if number % 2 else 1]:
                cpu_before, started = side.cpu_s(), time.perf_counter()
                found = list(clients.map(side.ask, prompts))
                elapsed, cpu_s = time.perf_counter() - started, side.cpu_s() - cpu_before
                ttft, _, cached = zip(*found, strict=True)
                taken[side.mode].append(Turn([*ttft], elapsed, cpu_s, cached))
    return taken


@contextmanager
def _server(args: argparse.Namespace, arm: str, logs: Path) -> Iterator[list[Side]]:
    """The server of an arm until the block ends, as a side for each of the arm's modes."""
    flags = ["--max-total-tokens", str(args.max_total_tokens), *shlex.split(" ".join(args.server_arg))]
    (kind,) = build_arms(["stock" if arm == "stock" else "pic"], server_args=flags, pic_config=None)
    with serving(args.model, kind, logs) as server:
        yield [
            Side(mode, partial(first_token, server.base_url, pic=MODES[mode], extra_key=mode), server.cpu_s)
            for mode in arm.split("+")
        ]


def summarize(args: argparse.Namespace, starts: Sequence[Start], num_turns: int) -> IdleOverhead:
    """The result of measured starts.

    Raises:
        BenchError: no turn counts.
    """
    turns = {(start.arm, start.round, mode): taken for start in starts for mode, taken in start.turns.items()}
    counted = [n for n in range(num_turns) if len({taken[n].cached_tokens for taken in turns.values()}) == 1]
    if not counted:
        raise BenchError("of every call some server took more tokens from its cache than the others: nothing counts.")
    rounds = range(args.repeats)
    wanted = {HEADLINE: [(("off+auto", n, "auto"), ("off+auto", n, "off")) for n in rounds]}
    for low, high in combinations(MODES, 2):
        wanted[f"{high} / {low}, between starts"] = [((high, n, high), (low, n, low)) for n in rounds]
    for mode in MODES:
        wanted[f"{mode} / {mode}, start to start"] = [((mode, n + 1, mode), (mode, n, mode)) for n in rounds]
    pairs = {
        name: [(turns[these], turns[those]) for these, those in each if these in turns and those in turns]
        for name, each in wanted.items()
    }
    return result_of(
        IdleOverhead,
        args,
        pairs=num_turns,
        counted=counted,
        comparisons=[_compared(name, found, counted, args.seed) for name, found in pairs.items() if found],
        starts=list(starts),
        server_args={"all": ["--max-total-tokens", str(args.max_total_tokens), *args.server_arg]},
    )


def _compared(name: str, pairs: Sequence[tuple[list[Turn], list[Turn]]], counted: list[int], seed: int) -> Comparison:
    def by_start(of: Callable[[Turn], float]) -> list[float]:
        return [median(of(these[n]) / of(those[n]) for n in counted) for these, those in pairs]

    found = {
        "ttft": by_start(lambda turn: median(turn.ttft_s)),
        "rate": by_start(lambda turn: len(turn.ttft_s) / turn.elapsed_s),
        "cpu": by_start(lambda turn: turn.cpu_s),
    }
    medians = {key: bootstrap(values, statistic=Statistic.MEDIAN, seed=seed) for key, values in found.items()}
    return Comparison(name=name, ttft_by_start=found["ttft"], **medians)


def _shown(result: IdleOverhead) -> str:
    rows = [
        [
            each.name,
            *(with_interval(one, "{:.3f}".format) for one in (each.ttft, each.rate, each.cpu)),
            " ".join(f"{ratio:.3f}" for ratio in each.ttft_by_start),
        ]
        for each in result.comparisons
    ]
    header = ["ratio, median over starts [95 %]", "time to first token", "requests a second", "processor time"]
    verdict = "within" if result.within_target else "NOT within"
    return (
        f"{markdown_table(Table([*header, 'time to first token by start'], rows))}\n\n"
        f"{len(result.counted)} of {result.pairs} turns count: of the others some server spliced or found more.\n"
        f"{verdict} the targets {result.target_ttft_ratio} and {result.target_rate_ratio}"
    )


if __name__ == "__main__":
    sys.exit(main())
