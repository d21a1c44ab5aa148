"""What `make gpu` runs, in order, and the figures it is run for. Imports no torch, so that a page can list them."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

LIMIT_S: Final = 480.0
"""Seconds that an item may take."""


class Need(Enum):
    """What an item needs beside a GPU."""

    TORCH = "torch and triton"
    SGLANG = "SGLang"


class Item(NamedTuple):
    """One step of the day; a failure of one does not stop the next."""

    name: str
    what: str
    need: Need
    work: str
    """`module:function` below `pic_bench.gpu`, of one argument, a `Work`; gives a `Found`."""


class Figure(NamedTuple):
    """One number that only a GPU can give, under a name that is a key of its item's `Found.figures`."""

    name: str
    item: str
    what: str
    form: str
    """For `format`."""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def aim(self) -> str:
        """In words; empty where the number is only to be known."""
        if self.at_least is not None:
            return f"at least {self.form.format(self.at_least)}"
        return "" if self.at_most is None else f"at most {self.form.format(self.at_most)}"

    def is_met(self, value: float) -> bool:
        """Whether a value reaches the aim; NaN never does."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is None or value <= self.at_most


ITEMS: Final = (
    Item("versions", "the card, its driver and what is installed", Need.TORCH, "versions:run"),
    Item("splice", "moved rows against float64, four dtypes and every layout; memory checked", Need.TORCH, "moves:run"),
    Item("gaps", "gap prefill against full prefill, then its time", Need.TORCH, "prefills:run_gaps"),
    Item("fa3", "a small model on fa3: self-test, slot checks, shift 0, moved text", Need.SGLANG, "checks:run_fa3"),
    Item("backends", "the same on triton and flashinfer, and with pages of 64", Need.SGLANG, "checks:run_backends"),
    Item("mla", "the same at DeepSeek-V2-Lite's dimensions with dummy weights", Need.SGLANG, "checks:run_mla"),
    Item("defaults", "an 8B model with the defaults: gate, off, shift 0, waits", Need.SGLANG, "defaults:run"),
    Item("bandwidth", "the splice against a device-to-device copy", Need.TORCH, "prefills:run_bandwidth"),
    Item("runs", "first token by length of a run, DeepSeek-V2-Lite's dimensions", Need.TORCH, "prefills:run_runs"),
    Item("energy", "joules with 95 % reused, repair and hashing included", Need.TORCH, "prefills:run_energy"),
    Item("latency", "first token and next tokens beside 16 streams, 90 % hits", Need.SGLANG, "latency:run"),
    Item("latency-eager", "the same with prefill graphs disabled", Need.SGLANG, "latency:run_eager"),
)  # fmt: skip


def _latency(item: str, where: str) -> list[Figure]:
    """The figures of one of the two latency items."""
    firsts = [
        Figure(f"{item}_ttft_{name}", item, f"median TTFT of stock over ours, {tokens} tokens{where}", "{:.2f} x")
        for name, tokens in (("2k", "2,048"), ("8k", "8,192"), ("32k", "32,768"))
    ]
    return [
        *firsts,
        Figure(f"{item}_itl", item, f"p99 between two tokens, ours over stock{where}", "{:.2f}"),
    ]


FIGURES: Final = (
    Figure("move_error", "splice", "largest error of a moved key, as a share of what is allowed", "{:.2f}", at_most=1),
    Figure("gap_error", "gaps", "largest error of a gap prefill's logits, as a share of what is allowed", "{:.2f}",
           at_most=1),
    Figure("gaps_8b", "gaps", "full over gap prefill, 32,768 tokens, 90 % in 8 runs, Llama-3.1-8B's dimensions",
           "{:.2f} x"),
    Figure("gaps_mla", "gaps", "the same at DeepSeek-V2-Lite's dimensions", "{:.2f} x"),
    *(
        Figure(f"{name}_kl", item, f"KL at shift 0, as a share of what is allowed, {words}", "{:.2f}", at_most=1)
        for name, item, words in (
            ("fa3", "fa3", "fa3"),
            ("triton", "backends", "triton"),
            ("flashinfer", "backends", "flashinfer"),
            ("page64", "backends", "pages of 64"),
            ("mla", "mla", "MLA"),
            ("defaults", "defaults", "8B with the defaults"),
        )
    ),
    Figure("gate_computed_us", "defaults", "cost of a computed token as learnt at start-up, microseconds", "{:.2f}"),
    Figure("gate_floor_us", "defaults", "shortest pass as learnt at start-up, microseconds", "{:.0f}"),
    Figure("gate_gap_us", "defaults", "cost of a gap as learnt at start-up, microseconds", "{:.0f}"),
    Figure("gate_taken", "defaults", "share of a moved text of 2,000 tokens that the gate lets splice", "{:.0%}",
           at_least=0.9),
    Figure("off_equal", "defaults", "answers of `mode: off` that equal stock's, token by token", "{:.0%}", at_least=1),
    Figure("waits", "defaults", "places of the plugin where the host waits for the device", "{:.0f}", at_most=0),
    Figure("share_of_copy_512", "bandwidth", "splice's bandwidth over a copy's, least of 512 tokens and more",
           "{:.0%}"),
    Figure("share_of_copy", "bandwidth", "the same, 8,192 tokens and more", "{:.0%}",
           at_least=0.85),
    Figure("run_3000", "runs", "full over spliced TTFT, a run of 3,000 tokens", "{:.2f} x", at_least=5),
    Figure("run_6000", "runs", "full over spliced TTFT, a run of 6,000 tokens", "{:.2f} x", at_least=10),
    Figure("break_even", "runs", "shortest run from which on splicing is sooner, tokens", "{:.0f}", at_most=63),
    Figure("energy_mla", "energy", "joules saved, 8,192 tokens, DeepSeek-V2-Lite's dimensions", "{:.0%}", at_least=0.8),
    Figure("energy_8b", "energy", "joules saved, 8,192 tokens, Llama-3.1-8B's dimensions", "{:.0%}", at_least=0.8),
    *_latency("latency", ""),
    *_latency("latency-eager", ", no prefill graphs"),
)  # fmt: skip
