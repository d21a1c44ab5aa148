"""The gap batches that every attention backend is compared on, and what a comparison says: values, without torch."""

from __future__ import annotations

from typing import Final, NamedTuple


class Request(NamedTuple):
    """One request of a batch: `[prefix_len, end)` is its extend, of which `runs` are spliced."""

    end: int
    prefix_len: int = 0
    runs: tuple[tuple[int, int], ...] = ()
    decodes: bool = False
    """It stands in a mixed batch with its next token."""


class Case(NamedTuple):
    """A batch."""

    requests: tuple[Request, ...]

    @property
    def num_gaps(self) -> int:
        """Virtual sequences of the requests with runs."""
        spliced = [request for request in self.requests if request.runs]
        return sum(len(request.runs) + (request.runs[0][0] > request.prefix_len) for request in spliced)

    @property
    def is_mixed(self) -> bool:
        return any(request.decodes for request in self.requests)


def _many_gaps(count: int, run_len: int) -> Request:
    """`count` gaps of 1 to 3 tokens with runs of `run_len` between them."""
    runs, position = [], 0
    for i in range(count - 1):
        start = position + 1 + i % 3
        runs.append((start, start + run_len))
        position = start + run_len
    return Request(end=position + 2, runs=tuple(runs))


CASES: Final = {
    "one_run": Case((Request(end=90, prefix_len=20, runs=((37, 70),)),)),
    "no_prefix": Case((Request(end=81, runs=((33, 64),)),)),
    "run_at_once": Case((Request(end=77, prefix_len=16, runs=((16, 60),)),)),
    "gap_of_one": Case((Request(end=66, prefix_len=9, runs=((10, 30), (31, 65))),)),
    "many_gaps": Case((_many_gaps(32, 5),)),
    "unequal": Case(
        (
            Request(end=150, prefix_len=3, runs=((40, 100),)),
            Request(end=18, prefix_len=1, runs=((5, 11), (13, 17))),
            Request(end=70, prefix_len=48, runs=((50, 65),)),
        )
    ),
    "beside_plain": Case(
        (
            Request(end=40),
            Request(end=95, prefix_len=17, runs=((30, 50), (66, 90))),
            Request(end=60, prefix_len=59),
            Request(end=33, prefix_len=32, runs=()),
            Request(end=64, runs=((20, 63),)),
        )
    ),
    "beside_decode": Case(
        (
            Request(end=88, prefix_len=16, runs=((33, 64),)),
            Request(end=50, prefix_len=49, decodes=True),
            Request(end=129, prefix_len=128, decodes=True),
        )
    ),
}
"""By name. A page table entry may be read by several gaps; lengths are no multiples of any page."""


class Shape(NamedTuple):
    """Heads and widths of an attention layer; with `rope_dim` it is MLA, whose row is a latent and a rotated key."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    rope_dim: int = 0
    window: int | None = None
    """Keys before its own that a query of the first layer sees; the others see all."""
    cap: float = 0.0
    """Scores `s` become `cap * tanh(s / cap)`."""
    has_sinks: bool = False
    """Each head has a score more, without a value."""
    has_window_pool: bool = False
    """The first layer has a pool and slots of its own."""
    chunk: int | None = None
    """Positions of the first layer that attend to each other only."""

    answer_window: int | None = None
    """Keys that a token of the answer sees beside those of the prompt."""

    @property
    def is_mla(self) -> bool:
        """Whether the value is the first part of the key row."""
        return self.rope_dim > 0


SHAPES: Final = {
    "gqa": Shape(4, 2, 32, 32),
    "mla": Shape(2, 1, 288, 256, rope_dim=32),
    "gemma": Shape(4, 2, 32, 32, window=24, cap=2.0),
    "gpt-oss": Shape(4, 2, 32, 32, window=24, has_sinks=True, has_window_pool=True),
    "llama4": Shape(4, 2, 32, 32, has_window_pool=True, chunk=32),
    "unlimited-ocr": Shape(4, 2, 32, 32, answer_window=4),
}

MUTATIONS: Final = {
    "page_table": "the row of one request names other slots",
    "lost_prefix": "a gap does not see the tokens before it",
    "swapped_owner": "two virtual sequences have each other's request",
    "short_sequence": "a gap does not see its own last key",
    "stale_run": "the rows of a run were not spliced",
}
"""What is broken, and how: a comparison that does not notice one of these proves nothing."""


class Comparison(NamedTuple):
    """How far a backend is from dense attention: largest absolute differences."""

    error: float
    """Of the gap batch's outputs, over all layers; infinite where one is not a number."""
    decode_error: float
    """Of the next pass, which decodes the last token of every request on the same rows."""
    sequences: int
    """Virtual sequences of the batch."""
