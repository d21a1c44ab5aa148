"""Does a server with the plugin cost nothing where nothing can be reused?

A stock and a patched server run side by side. Seeded random prompts that share nothing go to one of them at a time, in
the order stock, pic, pic, stock, and so on (ABBA), so that drift of the machine meets both alike. A turn is one prompt,
or with `--sessions N` as many as N clients send one after the other; both turns of a pair have the same prompts.

Starts of a server differ, and which of two started first may matter. So the servers are started in both orders,
`--repeats` times, and both orders count alike. The processor time of each server's processes is reported too, because
other work on the machine changes it least. Where starts differ by more than what is looked for, two baselines help:
`--baseline off` sends both turns of a pair to one patched server, one of them with `mode: off`, which neither plans nor
publishes; `--baseline control` starts two stock servers, and shows what starts alone make of the ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import shlex
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from pic_bench.compare.arms import Arm, build_arms
from pic_bench.compare.command import with_servers
from pic_bench.compare.server import Server, free_port, launch_command
from pic_bench.environment import Environment, capture_environment
from pic_bench.out_folder import write_json
from pic_bench.report.stats import Estimate, bootstrap_medians
from sglang_pic.errors import BenchError

BASELINES = ("stock", "off", "control")
_OFF: dict[str, object] = {"pic": {"mode": "off"}}
TARGET_TTFT_RATIO = 1.01
TARGET_RATE_RATIO = 0.99
FIRST_TOKEN_ID = 1000  # below lie the special tokens of the usual vocabularies
LAST_TOKEN_ID = 30_000


class Turn(NamedTuple):
    """What one server did with the prompts of one turn."""

    ttft_s: list[float]
    elapsed_s: float
    cpu_s: float

    @property
    def ttft_p50_s(self) -> float:
        """Median time to first token."""
        return median(self.ttft_s)

    @property
    def requests_per_s(self) -> float:
        """Requests answered per second, from the first one sent to the last one answered."""
        return len(self.ttft_s) / self.elapsed_s


class Side(NamedTuple):
    """Where the turns of one side go, and the options of their requests."""

    url: str
    cpu_s: Callable[[], float]
    """Processor time of the server's processes so far, in seconds."""
    options: dict[str, object] | None = None


class Start(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One start of both servers: which came first, and the turns of every pair on each."""

    first: str
    stock: list[Turn]
    pic: list[Turn]

    @property
    def ttft_ratios(self) -> list[float]:
        """pic / stock of the median time to first token, by pair."""
        return [patched.ttft_p50_s / plain.ttft_p50_s for plain, patched in zip(self.stock, self.pic, strict=True)]

    @property
    def rate_ratios(self) -> list[float]:
        """pic / stock of the requests per second, by pair."""
        pairs = zip(self.stock, self.pic, strict=True)
        return [patched.requests_per_s / plain.requests_per_s for plain, patched in pairs]

    @property
    def cpu_ratios(self) -> list[float]:
        """pic / stock of the processor time, by pair."""
        return [patched.cpu_s / plain.cpu_s for plain, patched in zip(self.stock, self.pic, strict=True)]


class Ratios(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """pic / stock: the geometric mean over starts of the median over pairs, with its interval (`bootstrap_medians`)."""

    ttft: Estimate
    rate: Estimate
    cpu: Estimate


class IdleOverhead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result: over both orders of start, and for each order."""

    schema_version: int = 6
    environment: Environment
    model: str
    baseline: str
    """What `stock` stands for: `stock` itself, `off`, requests with `mode: off` on the patched server, or `control`,
    where `pic` is a stock server too."""
    seed: int
    repeats: int
    pairs: int
    warmup_pairs: int
    sessions: int
    requests_per_session: int
    prompt_tokens: int
    stock_ttft_p50_s: float
    pic_ttft_p50_s: float
    ratios: Ratios
    by_first: dict[str, Ratios]
    target_ttft_ratio: float = TARGET_TTFT_RATIO
    target_rate_ratio: float = TARGET_RATE_RATIO
    starts: list[Start]
    server_args: dict[str, list[str]]

    @property
    def within_target(self) -> bool:
        """Whether neither ratio is worse than its target."""
        return self.ratios.ttft.value <= self.target_ttft_ratio and self.ratios.rate.value >= self.target_rate_ratio


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 within the target, 1 above it or a server failed, 130 interrupted."""
    args = parse(argv)

    def run(scratch: Path) -> int:
        result = _measure_with_servers(args, scratch)
        if args.out is not None:
            write_json(args.out, result)
        print(_lines(result))
        return 0 if result.within_target else 1

    return with_servers("idle_overhead", run)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m pic_bench.idle_overhead", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="model folder, as for `sglang serve`")
    add("--baseline", choices=BASELINES, default="stock", help="what the plugin is compared with (default: stock)")
    add("--repeats", type=int, default=1, help="how often the servers are started in each order (default: 1)")
    add("--pairs", type=int, default=40, help="measured pairs of each start (default: 40)")
    add("--warmup-pairs", type=int, default=8, help="pairs sent before and not counted, each start (default: 8)")
    add("--sessions", type=int, default=1, help="clients side by side (default: 1)")
    add("--requests", type=int, default=1, help="prompts of each client in a turn (default: 1)")
    add("--prompt-tokens", type=int, default=512, help="length of every prompt (default: 512)")
    add("--max-total-tokens", type=int, default=16384, help="KV pool of each server (default: 16384)")
    add("--server-arg", action="append", default=[], metavar="ARGS", help="flags for both servers")
    add("--seed", type=int, default=0, help="of the prompts (default: 0)")
    add("--out", type=Path, metavar="FILE", help="write the result as JSON there")
    args = parser.parse_args(argv)
    ones = (args.repeats, args.prompt_tokens, args.sessions, args.requests)
    if args.pairs < 2 or args.warmup_pairs < 0 or min(ones) < 1:
        parser.error("--pairs must be 2 or more, --warmup-pairs 0 or more, the others 1 or more")
    return args


def measure(sides: Sequence[Side], args: argparse.Namespace, *, pairs: int, seed: int) -> list[list[Turn]]:
    """The turns of `pairs` pairs on each of both sides, in ABBA order.

    Raises:
        BenchError: a server refused a request or broke off.
    """
    source = random.Random(seed)
    turns: list[list[Turn]] = [[] for _ in sides]
    with ThreadPoolExecutor(args.sessions) as clients:
        for number in range(pairs):
            prompts = [
                [
                    [source.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(args.prompt_tokens)]
                    for _ in range(args.requests)
                ]
                for _ in range(args.sessions)
            ]
            order = list(zip(sides, turns, strict=True))
            for side, into in order if number % 2 == 0 else reversed(order):
                into.append(_take_turn(side, prompts, clients))
    return turns


def _take_turn(side: Side, prompts: list[list[list[int]]], clients: ThreadPoolExecutor) -> Turn:
    cpu_before, started = side.cpu_s(), time.perf_counter()
    times = list(clients.map(lambda session: [_ttft(side, prompt) for prompt in session], prompts))
    elapsed = time.perf_counter() - started
    return Turn(list(itertools.chain.from_iterable(times)), elapsed, side.cpu_s() - cpu_before)


def _measure_with_servers(args: argparse.Namespace, logs: Path) -> IdleOverhead:
    extra = [word for text in args.server_arg for word in shlex.split(text)]
    flags = ["--max-total-tokens", str(args.max_total_tokens), *extra]
    arms = build_arms(["stock", "pic"], server_args=flags, pic_config=None)
    if args.baseline == "control":
        arms[1] = msgspec.structs.replace(arms[0], name="pic")
    starts: list[Start] = []
    for repeat in range(args.repeats):
        # Every second repeat the other way round, so that drift of the machine meets both orders alike.
        for order in (arms, arms[::-1]) if repeat % 2 == 0 else (arms[::-1], arms):
            starts.append(_measure_start(args, order, len(starts), logs))
    return summarize(args, starts, {arm.name: list(arm.server_args) for arm in arms})


def _measure_start(args: argparse.Namespace, order: Sequence[Arm], number: int, logs: Path) -> Start:
    """Start both servers in this order, measure all pairs, stop both."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for arm in order:
            if arm.name == "stock" and args.baseline == "off":
                continue
            port = free_port()
            print(f"start {number + 1} of {2 * args.repeats}: the {arm.name} server", file=sys.stderr)
            command = launch_command(args.model, port, arm.server_args)
            server = Server(command, port=port, log_path=logs / f"{number}-{arm.name}.log", env=arm.env)
            servers[arm.name] = stack.enter_context(server)
        for server in servers.values():
            stack.enter_context(server.watch())
        sides = [_side(servers[name]) for name in ("stock", "pic") if name in servers]
        if args.baseline == "off":
            sides.insert(0, _side(servers["pic"], _OFF))
        print(f"warming up with {args.warmup_pairs} pairs, then measuring {args.pairs}", file=sys.stderr)
        # No two measurements of one result have the same prompts.
        measure(sides, args, pairs=args.warmup_pairs, seed=args.seed + 2 * number + 1)
        stock, pic = measure(sides, args, pairs=args.pairs, seed=args.seed + 2 * number)
    return Start(first=order[0].name, stock=stock, pic=pic)


def _side(server: Server, options: dict[str, object] | None = None) -> Side:
    return Side(server.base_url, server.cpu_s, options)


def summarize(args: argparse.Namespace, starts: list[Start], server_args: dict[str, list[str]]) -> IdleOverhead:
    """The result of measured starts."""
    by_first: dict[str, list[Start]] = {}
    for start in starts:
        by_first.setdefault(start.first, []).append(start)

    def ratios(orders: Sequence[Sequence[Start]]) -> Ratios:
        def estimate(of: Callable[[Start], list[float]]) -> Estimate:
            return bootstrap_medians([[of(start) for start in order] for order in orders], seed=args.seed)

        return Ratios(
            ttft=estimate(lambda start: start.ttft_ratios),
            rate=estimate(lambda start: start.rate_ratios),
            cpu=estimate(lambda start: start.cpu_ratios),
        )

    return IdleOverhead(
        environment=capture_environment(),
        model=args.model,
        baseline=args.baseline,
        seed=args.seed,
        repeats=args.repeats,
        pairs=args.pairs,
        warmup_pairs=args.warmup_pairs,
        sessions=args.sessions,
        requests_per_session=args.requests,
        prompt_tokens=args.prompt_tokens,
        stock_ttft_p50_s=median(time for start in starts for turn in start.stock for time in turn.ttft_s),
        pic_ttft_p50_s=median(time for start in starts for turn in start.pic for time in turn.ttft_s),
        ratios=ratios(list(by_first.values())),
        by_first={first: ratios([order]) for first, order in by_first.items()},
        starts=starts,
        server_args=server_args,
    )


def _ttft(side: Side, prompt: list[int]) -> float:
    """Seconds from sending one request to the first event of its stream; the stream is read to its end."""
    sampling = {"max_new_tokens": 1, "temperature": 0, "custom_params": side.options}
    body = {"input_ids": prompt, "stream": True, "sampling_params": sampling}
    request = urllib.request.Request(
        side.url + "/generate", data=msgspec.json.encode(body), headers={"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    started = time.perf_counter()
    try:
        with opener.open(request, timeout=600) as answer:
            first = answer.readline()
            elapsed = time.perf_counter() - started
            answer.read()
    except OSError as error:
        raise BenchError(f"{side.url}/generate: {error}") from error
    if not first.startswith(b"data:") or b'"error"' in first:
        raise BenchError(f"{side.url}/generate answered {first[:200]!r}; expected the first event of a stream.")
    return elapsed


def _lines(result: IdleOverhead) -> str:
    def interval(of: Estimate) -> str:
        return f"{of.value:.4f} (95 % {of.low:.4f} to {of.high:.4f})"

    def both(ratios: Ratios) -> str:
        return (
            f"TTFT {interval(ratios.ttft)}, requests per second {interval(ratios.rate)}, "
            f"processor time {interval(ratios.cpu)}"
        )

    verdict = "within" if result.within_target else "NOT within"
    stock_ms, pic_ms = 1e3 * result.stock_ttft_p50_s, 1e3 * result.pic_ttft_p50_s
    each = (f"{start.first} {median(start.ttft_ratios):.4f} {median(start.rate_ratios):.4f}" for start in result.starts)
    return "\n".join(
        [
            f"nothing to reuse, baseline {result.baseline}, {len(result.starts)} starts with {result.pairs} pairs of "
            f"turns each, {result.sessions} clients side by side, prompts of {result.prompt_tokens} random tokens: "
            f"median TTFT stock {stock_ms:.1f} ms, pic {pic_ms:.1f} ms",
            f"pic / stock, both orders: {both(result.ratios)}; "
            f"{verdict} the targets {result.target_ttft_ratio} and {result.target_rate_ratio}",
            *(f"  {first} started first: {both(ratios)}" for first, ratios in result.by_first.items()),
            f"  each start (first, TTFT, requests per second): {'; '.join(each)}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
