"""First tokens and the time between tokens beside decoding streams: stock SGLang and ours, the same prompts.

Nine tenths of a prompt were computed before behind another header, so that stock finds no prefix of it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, Final

import numpy as np

from pic_bench.compare.server import Server
from pic_bench.gpu.record import Found, Work
from pic_bench.gpu.servers import Model, dummy_model, plugin_state, serving
from pic_bench.serving import events, first_token
from sglang_pic.errors import BenchError

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
        with serving(work, f"{item}-{arm}", arm, model, flags, config=config) as server:
            raw[arm] = measure(server, model, lengths, streams, repeats)
            if arm == "pic":
                raw["state"] = plugin_state(server)
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
    with Streams(server, model, streams) as running:
        for name, num_tokens in lengths.items():
            text = model.tokens(draw, round(_HIT_SHARE * num_tokens))
            shares = []
            # The first one computes the text that the others find; its own time does not count.
            for number in range(repeats + 1):
                header = model.tokens(draw, (num_tokens - len(text)) // 2 + 3 * (number - repeats // 2))
                question = model.tokens(draw, num_tokens - len(text) - len(header))
                if number == 1:
                    running.counts.set()
                found = first_token(server.base_url, header + text + question)
                if number:
                    first[name].append(found.seconds)
                    shares.append(found.cached_tokens / found.prompt_tokens)
            running.counts.clear()
            cached[name] = median(shares)
    return {"ttft_s": first, "cached": cached, "between_s": running.between}


class Streams:
    """Requests that decode in the background while the block runs; one that ends is followed by another."""

    def __init__(self, server: Server, model: Model, count: int) -> None:
        """Start them when the block is entered."""
        draw = random.Random(6)
        self._url, self._prompts = server.base_url, [model.tokens(draw, _STREAM_PROMPT) for _ in range(count)]
        self._threads = ThreadPoolExecutor(count, "stream")
        self._over, self._began = threading.Event(), threading.Barrier(count + 1)
        self.counts = threading.Event()
        """Set while times count."""
        self.between: list[float] = []
        """Seconds between two tokens of one stream, while they count."""

    def __enter__(self) -> Streams:
        self._streams = [self._threads.submit(self._decode, prompt) for prompt in self._prompts]
        try:
            self._began.wait(_TIMEOUT_S)
        except threading.BrokenBarrierError:
            self.__exit__()
            raise BenchError(f"a stream did not begin within {_TIMEOUT_S:.0f} s.") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._threads.shutdown()
        for stream in self._streams:
            if isinstance(error := stream.exception(), BenchError):
                raise BenchError(f"a stream broke off: {error}") from error

    def _decode(self, prompt: list[int]) -> None:
        has_begun = False
        try:
            while not self._over.is_set():
                last = None
                for _ in events(self._url, prompt, _STREAM_TOKENS, timeout_s=_TIMEOUT_S):
                    now = time.perf_counter()
                    if not has_begun:
                        has_begun = True
                        self._began.wait(_TIMEOUT_S)
                    elif last is not None and self.counts.is_set():
                        self.between.append(now - last)
                    last = now
                    if self._over.is_set():
                        break
        except BenchError:
            self._began.abort()
            raise
