"""The estimate of memory beside what is really allocated: the bound in bytes is only as good as it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from core_builders import join

from sglang_pic.core import MOST_REUSE, ContentIndex, CoreConfig, Tokens, as_tokens
from sglang_pic.core.invariants import check

FACTOR = 1.5
BYTES_PER_TOKEN = 24


def paths(rng: np.random.Generator, num_paths: int, length: int) -> Iterator[tuple[Tokens, int]]:
    for _ in range(num_paths):
        yield as_tokens(rng.integers(3, 50_000, length)), 0


def conversations(
    rng: np.random.Generator, num_conversations: int, num_turns: int, length: int
) -> Iterator[tuple[Tokens, int]]:
    """Turns of conversations that take turns, behind one system prompt: each path, and what of it is there already."""
    system = as_tokens(rng.integers(3, 50_000, 2_000))
    turns = [system] * num_conversations
    for _ in range(num_turns):
        for i, path in enumerate(turns):
            turns[i] = join(path, as_tokens(rng.integers(3, 50_000, length)))
            yield turns[i], len(path)


def equal_text(rng: np.random.Generator, num_paths: int) -> Iterator[tuple[Tokens, int]]:
    """The same documents in other orders: many donors of each chunk."""
    documents = [as_tokens(rng.integers(3, 50_000, 200)) for _ in range(10)]
    for _ in range(num_paths):
        header = as_tokens(rng.integers(3, 50_000, 40))
        yield join(header, *(documents[i] for i in rng.permutation(10))), 0


WORKLOADS: dict[str, Callable[[np.random.Generator], Iterator[tuple[Tokens, int]]]] = {
    "long paths": lambda rng: paths(rng, 4, 40_000),
    "paths of 600": lambda rng: paths(rng, 200, 600),
    "paths of 60": lambda rng: paths(rng, 600, 60),
    "conversations": lambda rng: conversations(rng, 6, 40, 400),
    "conversations of short turns": lambda rng: conversations(rng, 6, 100, 40),
    "equal text": lambda rng: equal_text(rng, 60),
}

LONG_ENOUGH = ("long paths", "paths of 600", "conversations")
"""Workloads whose segments are long enough for a bound by token."""


def traced(index_of: Callable[[], ContentIndex]) -> tuple[ContentIndex, int]:
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        index = index_of()
        gc.collect()
        return index, tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def fill(kind: str, config: CoreConfig | None = None) -> ContentIndex:
    index = ContentIndex(config)
    for path, known_len in WORKLOADS[kind](np.random.default_rng(0)):
        index.publish("a", path, [(known_len, len(path))])
    return index


@pytest.mark.parametrize("kind", WORKLOADS)
def test_the_estimate_is_what_is_allocated_and_bounds_it(kind: str) -> None:
    """With room for all, and with eviction all the time."""
    index, num_bytes = traced(lambda: fill(kind))
    assert num_bytes / FACTOR <= index.stats().num_bytes <= num_bytes * FACTOR
    if kind in LONG_ENOUGH:
        assert num_bytes <= BYTES_PER_TOKEN * index.stats().num_tokens
    config = CoreConfig(seam_tokens=1, tail_tokens=0, max_index_bytes=200_000)
    index, num_bytes = traced(lambda: fill(kind, config))
    assert index.stats().num_evicted_tokens > 0
    assert num_bytes <= FACTOR * config.max_index_bytes


def test_many_namespaces_that_were_large_once_are_small_again() -> None:
    def shrink() -> ContentIndex:
        index = ContentIndex(MOST_REUSE)
        rng = np.random.default_rng(0)
        small = as_tokens(rng.integers(3, 50_000, 300))
        for i in range(10):
            index.publish(i, small, [(0, len(small))])
            large = as_tokens(rng.integers(3, 50_000, 30_000))
            index.publish(i, large, [(0, len(large))])
            index.forget(i, large, 0)
        return index

    index, num_bytes = traced(shrink)
    assert index.stats().num_tokens == 3_000
    check(index)
    # A fresh table has some kilobytes of its own, and keeps room for as many donors again.
    assert num_bytes <= 2 * index.stats().num_bytes + 10 * 6_000
