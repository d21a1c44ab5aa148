"""First tokens and the time between tokens beside decoding streams: stock SGLang and ours, the same prompts.

Nine tenths of a prompt were computed before behind another header, so that stock finds no prefix of it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any, Final

import numpy as np

from pic_bench.compare.server import Server
from pic_bench.gpu.record import Found, Work
from pic_bench.gpu.servers import Model, dummy_model, make_arm, sound
from pic_bench.serving import events, first_token

NO_PREFILL_GRAPHS: Final = ("--cuda-graph-config", '{"prefill": {"backend": "disabled"}}')
# The text is spliced wherever it stands, as nine tenths are wanted; the cost gate decides as by default.
_CONFIG: Final = {"self_test": "off", "audit_rate": 0.0, "core": {"tail_tokens": 0, "edit": "in_place"}}
_HIT_SHARE: Final = 0.9
_LENGTHS: Final = {"2k": 2_048, "8k": 8_192, "32k": 32_768}
_DRY_LENGTHS: Final = {"2k": 256, "8k": 512, "32k": 1_024}
_STREAM_PROMPT, _STREAM_TOKENS = 256, 4_000
_TIMEOUT_S: Final = 120.0


def run(work: Work) -> Found:
    """Both arms as users start them."""
    return _run(work, "latency", ())


def run_eager(work: Work) -> Found:
    """Both arms with prefill graphs disabled, to part them from the splice."""
    return _run(work, "latency-eager", NO_PREFILL_GRAPHS)


def _run(work: Work, item: str, flags: Sequence[str]) -> Found:
    model = dummy_model(work, "Llama-3.1-8B")
    lengths, streams, repeats = (_DRY_LENGTHS, 2, 2) if work.is_dry else (_LENGTHS, 16, 7)
    raw: dict[str, Any] = {}
    for arm in ("stock", "pic"):
        config = _CONFIG if arm == "pic" else None
        with sound(work, f"{item}-{arm}", model, make_arm(arm, model, flags, config)) as server:
            raw[arm] = measure(server, model, lengths, streams, repeats)
    stock, ours = raw["stock"], raw["pic"]
    figures = {f"{item}_ttft_{name}": median(stock["ttft_s"][name]) / median(ours["ttft_s"][name]) for name in lengths}
    figures[f"{item}_itl"] = np.percentile(ours["between_s"], 99) / np.percentile(stock["between_s"], 99)
    notes = [
        f"{tokens:,} tokens: {share:.0%} came from the cache, wanted {_HIT_SHARE:.0%}"
        for (name, tokens), share in zip(lengths.items(), ours["cached"].values(), strict=True)
        if share < _HIT_SHARE - 0.05
    ]
    return Found(figures={name: float(value) for name, value in figures.items()}, notes=notes, raw=raw)


def measure(server: Server, model: Model, lengths: dict[str, int], streams: int, repeats: int) -> dict[str, Any]:
    """TTFT by length, tokens from the cache by length, and all times between two tokens of a stream meanwhile."""
    draw = random.Random(5)
    first: dict[str, list[float]] = {name: [] for name in lengths}
    cached: dict[str, float] = {}
    counts = threading.Event()
    with decoding(server, model, streams, counts) as between:
        for name, num_tokens in lengths.items():
            text = model.tokens(draw, round(_HIT_SHARE * num_tokens))
            shares = []
            # The first one computes the text that the others find; its own time does not count.
            for number in range(repeats + 1):
                header = model.tokens(draw, (num_tokens - len(text)) // 2 + 3 * (number - repeats // 2))
                question = model.tokens(draw, num_tokens - len(text) - len(header))
                if number == 1:
                    counts.set()
                found = first_token(server.base_url, header + text + question)
                if number:
                    first[name].append(found.seconds)
                    shares.append(found.cached_tokens / found.prompt_tokens)
            counts.clear()
            cached[name] = median(shares)
    return {"ttft_s": first, "cached": cached, "between_s": between}


@contextmanager
def decoding(server: Server, model: Model, count: int, counts: threading.Event) -> Iterator[list[float]]:
    """So many requests that decode while the block runs, begun before it; one that ends is followed by another.

    Yields the seconds between two tokens of one stream, which grow while `counts` is set.

    Raises:
        BenchError: a stream does not begin, or breaks off.
    """
    draw, over = random.Random(6), threading.Event()
    between: list[float] = []

    def begin() -> Iterator[dict[str, Any]]:
        stream = events(server.base_url, model.tokens(draw, _STREAM_PROMPT), _STREAM_TOKENS, timeout_s=_TIMEOUT_S)
        next(stream, None)
        return stream

    def decode(stream: Iterator[dict[str, Any]]) -> None:
        while not over.is_set():
            last = time.perf_counter()
            for _ in stream:
                now = time.perf_counter()
                if counts.is_set():
                    between.append(now - last)
                last = now
                if over.is_set():
                    break
            else:
                stream = begin()

    begun = [begin() for _ in range(count)]
    with ThreadPoolExecutor(count, "stream") as threads:
        running = [threads.submit(decode, stream) for stream in begun]
        try:
            yield between
        finally:
            over.set()
    for stream in running:
        stream.result()
