"""Does a server with the plugin cost nothing where nothing can be reused?

A stock and a patched server run side by side. Seeded random prompts that share nothing go to one of them at a time, in
the order stock, pic, pic, stock, and so on (ABBA), so that drift of the machine meets both alike. A turn is one prompt,
or with `--sessions N` as many as N clients send one after the other; both turns of a pair have the same prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import shlex
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from pic_bench.compare.arms import build_arms
from pic_bench.compare.command import interrupt_on_sigterm
from pic_bench.compare.server import Server, free_port, launch_command
from pic_bench.environment import Environment, capture_environment
from pic_bench.out_folder import write_json
from pic_bench.report.stats import Estimate, Statistic, bootstrap
from sglang_pic.errors import BenchError, PicError

TARGET_TTFT_RATIO = 1.01
TARGET_RATE_RATIO = 0.99
FIRST_TOKEN_ID = 1000  # below lie the special tokens of the usual vocabularies
LAST_TOKEN_ID = 30_000


class Turn(NamedTuple):
    """What one server did with the prompts of one turn."""

    ttft_s: list[float]
    elapsed_s: float

    @property
    def ttft_p50_s(self) -> float:
        """Median time to first token."""
        return median(self.ttft_s)

    @property
    def requests_per_s(self) -> float:
        """Requests answered per second, from the first one sent to the last one answered."""
        return len(self.ttft_s) / self.elapsed_s


class IdleOverhead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result: medians over pairs of pic / stock, with their 95 % bootstrap intervals."""

    schema_version: int = 3
    environment: Environment
    model: str
    seed: int
    pairs: int
    warmup_pairs: int
    sessions: int
    requests_per_session: int
    prompt_tokens: int
    stock_ttft_p50_s: float
    pic_ttft_p50_s: float
    ttft_ratio: Estimate
    rate_ratio: Estimate
    target_ttft_ratio: float = TARGET_TTFT_RATIO
    target_rate_ratio: float = TARGET_RATE_RATIO
    stock: list[Turn]
    pic: list[Turn]
    server_args: dict[str, list[str]]

    @property
    def within_target(self) -> bool:
        """Whether neither median ratio is worse than its target."""
        return self.ttft_ratio.value <= self.target_ttft_ratio and self.rate_ratio.value >= self.target_rate_ratio


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 within the target, 1 above it or a server failed, 130 interrupted."""
    args = parse(argv)
    try:
        with interrupt_on_sigterm(), tempfile.TemporaryDirectory() as scratch:
            result = _measure_with_servers(args, Path(scratch))
    except PicError as error:
        print(f"idle_overhead: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; servers stopped", file=sys.stderr)
        return 130
    if args.out is not None:
        write_json(args.out, result)
    print(_sentence(result))
    return 0 if result.within_target else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m pic_bench.idle_overhead", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="model folder, as for `sglang serve`")
    add("--pairs", type=int, default=80, help="measured pairs (default: 80; at least 60 for a verdict)")
    add("--warmup-pairs", type=int, default=8, help="pairs sent before and not counted (default: 8)")
    add("--sessions", type=int, default=1, help="clients side by side (default: 1)")
    add("--requests", type=int, default=1, help="prompts of each client in a turn (default: 1)")
    add("--prompt-tokens", type=int, default=512, help="length of every prompt (default: 512)")
    add("--max-total-tokens", type=int, default=16384, help="KV pool of each server (default: 16384)")
    add("--server-arg", action="append", default=[], metavar="ARGS", help="flags for both servers")
    add("--seed", type=int, default=0, help="of the prompts (default: 0)")
    add("--out", type=Path, metavar="FILE", help="write the result as JSON there")
    args = parser.parse_args(argv)
    if args.pairs < 2 or args.warmup_pairs < 0 or min(args.prompt_tokens, args.sessions, args.requests) < 1:
        parser.error("--pairs must be 2 or more, --warmup-pairs 0 or more, the others 1 or more")
    return args


def measure(urls: Sequence[str], args: argparse.Namespace, *, pairs: int, seed: int) -> list[list[Turn]]:
    """The turns of `pairs` pairs on each of both servers, in ABBA order.

    Raises:
        BenchError: a server refused a request or broke off.
    """
    source = random.Random(seed)
    turns: list[list[Turn]] = [[] for _ in urls]
    with ThreadPoolExecutor(args.sessions) as clients:
        for number in range(pairs):
            prompts = [
                [
                    [source.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(args.prompt_tokens)]
                    for _ in range(args.requests)
                ]
                for _ in range(args.sessions)
            ]
            order = list(zip(urls, turns, strict=True))
            for url, into in order if number % 2 == 0 else reversed(order):
                into.append(_take_turn(url, prompts, clients))
    return turns


def _take_turn(url: str, prompts: list[list[list[int]]], clients: ThreadPoolExecutor) -> Turn:
    started = time.perf_counter()
    times = list(clients.map(lambda session: [_ttft(url, prompt) for prompt in session], prompts))
    return Turn(list(itertools.chain.from_iterable(times)), time.perf_counter() - started)


def _measure_with_servers(args: argparse.Namespace, logs: Path) -> IdleOverhead:
    extra = [word for text in args.server_arg for word in shlex.split(text)]
    flags = ["--max-total-tokens", str(args.max_total_tokens), *extra]
    arms = build_arms(["stock", "pic"], server_args=flags, pic_config=None)
    with contextlib.ExitStack() as stack:
        servers = []
        for arm in arms:
            port = free_port()
            print(f"starting the {arm.name} server", file=sys.stderr)
            command = launch_command(args.model, port, arm.server_args)
            server = Server(command, port=port, log_path=logs / f"{arm.name}.log", env=arm.env)
            servers.append(stack.enter_context(server))
        urls = [server.base_url for server in servers]
        for server in servers:
            stack.enter_context(server.watch())
        print(f"warming up with {args.warmup_pairs} pairs, then measuring {args.pairs}", file=sys.stderr)
        measure(urls, args, pairs=args.warmup_pairs, seed=args.seed + 1)
        stock, pic = measure(urls, args, pairs=args.pairs, seed=args.seed)
    return summarize(args, stock, pic, {arm.name: list(arm.server_args) for arm in arms})


def summarize(
    args: argparse.Namespace, stock: list[Turn], pic: list[Turn], server_args: dict[str, list[str]]
) -> IdleOverhead:
    """The result of measured turns; pairs are the turns of one number."""
    pairs = list(zip(stock, pic, strict=True))

    def estimate(ratios: list[float]) -> Estimate:
        return bootstrap(ratios, statistic=Statistic.MEDIAN, seed=args.seed)

    return IdleOverhead(
        environment=capture_environment(),
        model=args.model,
        seed=args.seed,
        pairs=args.pairs,
        warmup_pairs=args.warmup_pairs,
        sessions=args.sessions,
        requests_per_session=args.requests,
        prompt_tokens=args.prompt_tokens,
        stock_ttft_p50_s=median(time for turn in stock for time in turn.ttft_s),
        pic_ttft_p50_s=median(time for turn in pic for time in turn.ttft_s),
        ttft_ratio=estimate([patched.ttft_p50_s / plain.ttft_p50_s for plain, patched in pairs]),
        rate_ratio=estimate([patched.requests_per_s / plain.requests_per_s for plain, patched in pairs]),
        stock=stock,
        pic=pic,
        server_args=server_args,
    )


def _ttft(url: str, prompt: list[int]) -> float:
    """Seconds from sending one request to the first event of its stream; the stream is read to its end."""
    body = {"input_ids": prompt, "stream": True, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    request = urllib.request.Request(
        url + "/generate", data=msgspec.json.encode(body), headers={"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    started = time.perf_counter()
    try:
        with opener.open(request, timeout=600) as answer:
            first = answer.readline()
            elapsed = time.perf_counter() - started
            answer.read()
    except OSError as error:
        raise BenchError(f"{url}/generate: {error}") from error
    if not first.startswith(b"data:") or b'"error"' in first:
        raise BenchError(f"{url}/generate answered {first[:200]!r}; expected the first event of a stream.")
    return elapsed


def _sentence(result: IdleOverhead) -> str:
    def interval(of: Estimate) -> str:
        return f"{of.value:.4f} (95 % {of.low:.4f} to {of.high:.4f})"

    verdict = "within" if result.within_target else "NOT within"
    stock_ms, pic_ms = 1e3 * result.stock_ttft_p50_s, 1e3 * result.pic_ttft_p50_s
    return (
        f"nothing to reuse, {result.pairs} pairs of turns, {result.sessions} clients side by side, prompts of "
        f"{result.prompt_tokens} random tokens: median TTFT stock {stock_ms:.1f} ms, pic {pic_ms:.1f} ms; medians of "
        f"paired ratios: TTFT {interval(result.ttft_ratio)}, of requests per second {interval(result.rate_ratio)}; "
        f"{verdict} the targets {result.target_ttft_ratio} and {result.target_rate_ratio}"
    )


if __name__ == "__main__":
    sys.exit(main())
