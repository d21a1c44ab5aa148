"""Does a server with the plugin cost nothing where nothing can be reused?

A stock and a patched server run side by side. Seeded random prompts that share nothing go to them one at a time, in the
order stock, pic, pic, stock, and so on (ABBA), so that drift of the machine meets both alike. Each pair of requests has
the same prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shlex
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from pic_bench.compare.arms import build_arms
from pic_bench.compare.command import interrupt_on_sigterm
from pic_bench.compare.server import Server, free_port, launch_command
from pic_bench.environment import Environment, capture_environment
from pic_bench.out_folder import write_json
from pic_bench.report.stats import Estimate, Statistic, bootstrap
from sglang_pic.errors import BenchError, PicError

TARGET_RATIO = 1.02
FIRST_TOKEN_ID = 1000  # below lie the special tokens of the usual vocabularies
LAST_TOKEN_ID = 30_000


class IdleOverhead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result: `ratio` is the median over pairs of pic TTFT / stock TTFT, with its 95 % bootstrap interval."""

    schema_version: int = 2
    environment: Environment
    model: str
    seed: int
    pairs: int
    warmup_pairs: int
    prompt_tokens: int
    stock_ttft_p50_s: float
    pic_ttft_p50_s: float
    ratio: Estimate
    target_ratio: float
    stock_ttft_s: list[float]
    pic_ttft_s: list[float]
    server_args: dict[str, list[str]]

    @property
    def within_target(self) -> bool:
        """Whether the median ratio is at most the target."""
        return self.ratio.value <= self.target_ratio


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 within the target, 1 above it or a server failed, 130 interrupted."""
    args = _parse(argv)
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


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pic_bench.idle_overhead", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="model folder, as for `sglang serve`")
    add("--pairs", type=int, default=80, help="measured pairs (default: 80; at least 60 for a verdict)")
    add("--warmup-pairs", type=int, default=8, help="pairs sent before and not counted (default: 8)")
    add("--prompt-tokens", type=int, default=512, help="length of every prompt (default: 512)")
    add("--max-total-tokens", type=int, default=16384, help="KV pool of each server (default: 16384)")
    add("--server-arg", action="append", default=[], metavar="ARGS", help="flags for both servers")
    add("--seed", type=int, default=0, help="of the prompts (default: 0)")
    add("--out", type=Path, metavar="FILE", help="write the result as JSON there")
    args = parser.parse_args(argv)
    if args.pairs < 2 or args.warmup_pairs < 0 or args.prompt_tokens < 1:
        parser.error("--pairs must be 2 or more, --warmup-pairs 0 or more, --prompt-tokens 1 or more")
    return args


def measure(
    stock_url: str, pic_url: str, *, pairs: int, prompt_tokens: int, seed: int
) -> tuple[list[float], list[float]]:
    """TTFT in seconds of `pairs` prompts on both servers, one request at a time, in ABBA order.

    Raises:
        BenchError: a server refused a request or broke off.
    """
    source = random.Random(seed)
    stock: list[float] = []
    pic: list[float] = []
    for number in range(pairs):
        prompt = [source.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(prompt_tokens)]
        order = [(stock_url, stock), (pic_url, pic)]
        for url, times in order if number % 2 == 0 else reversed(order):
            times.append(_ttft(url, prompt))
    return stock, pic


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
        measure(*urls, pairs=args.warmup_pairs, prompt_tokens=args.prompt_tokens, seed=args.seed + 1)
        stock, pic = measure(*urls, pairs=args.pairs, prompt_tokens=args.prompt_tokens, seed=args.seed)
    ratios = [patched / plain for plain, patched in zip(stock, pic, strict=True)]
    return IdleOverhead(
        environment=capture_environment(),
        model=args.model,
        seed=args.seed,
        pairs=args.pairs,
        warmup_pairs=args.warmup_pairs,
        prompt_tokens=args.prompt_tokens,
        stock_ttft_p50_s=median(stock),
        pic_ttft_p50_s=median(pic),
        ratio=bootstrap(ratios, statistic=Statistic.MEDIAN, seed=args.seed),
        target_ratio=TARGET_RATIO,
        stock_ttft_s=stock,
        pic_ttft_s=pic,
        server_args={arm.name: list(arm.server_args) for arm in arms},
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
    ratio, verdict = result.ratio, "within" if result.within_target else "ABOVE"
    stock_ms, pic_ms = 1e3 * result.stock_ttft_p50_s, 1e3 * result.pic_ttft_p50_s
    return (
        f"nothing to reuse, {result.pairs} pairs of {result.prompt_tokens} random tokens: median TTFT stock "
        f"{stock_ms:.1f} ms, pic {pic_ms:.1f} ms; median of the paired ratios {ratio.value:.4f} "
        f"(95 % {ratio.low:.4f} to {ratio.high:.4f}), {verdict} the target {result.target_ratio}"
    )


if __name__ == "__main__":
    sys.exit(main())
