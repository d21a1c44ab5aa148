"""What one tenant can publish must neither make the plans of others in its namespace slow nor outgrow the bounds.

Work that a plan counts is no proof that it is bounded, so the lines of Python are counted that a plan executes; and the
estimate of memory stands beside what is really allocated.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from pic_bench.probe_plugin.invariants import check

from sglang_pic.core import ContentIndex, CoreConfig, DropReason, Tokens, as_tokens, native
from sglang_pic.core.alignment import MAX_ALIGNED_FIELDS
from tests.fuzz.attacks import ATTACKS, LEXICON, fields_in_every_line, publish, text
from tests.helpers.core_builders import join, plan_of, publish_rows


def lines_executed(call: Callable[[], object]) -> int:
    """How many lines of Python a call executes, its callees' and each turn of a comprehension with them.

    Those of loops do not count, compiled or not.
    """
    num_lines, loops = 0, {loop.__code__ for loop in native.PLAIN.values()}

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_lines
        if frame.f_code in loops:
            return None
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_lines


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_plan_is_linear_work_whatever_was_published(attack: Callable[..., Tokens]) -> None:
    index = ContentIndex(CoreConfig(), lexicon=LEXICON)
    prompt = attack(index)
    num_lines = lines_executed(lambda: plan_of(index, prompt))
    assert num_lines <= ATTACKS[attack] * len(prompt) + 100_000
    assert num_lines <= 6 * index.num_work + 100_000, "nothing is done that is not counted"
    check(index)


def test_what_is_given_up_is_computed_and_counted() -> None:
    """Runs behind more changed fields than are looked at would be spliced with old conclusions in them."""
    index = ContentIndex(CoreConfig(), lexicon=LEXICON)
    prompt = fields_in_every_line(index)
    plan = plan_of(index, prompt)
    assert plan.dropped[DropReason.BUDGET] > 10
    last = max(run.target_start for run in plan.runs)
    num_before = (last - 60) // 152
    assert num_before <= len(plan.changed_fields) <= MAX_ALIGNED_FIELDS, "every field before a run is known"
    assert last < len(prompt) / 2


@pytest.mark.parametrize("num_fields", [40, MAX_ALIGNED_FIELDS + 1])
def test_every_field_before_a_run_is_known_however_many_stand_there(num_fields: int) -> None:
    """Short lines whose stamps changed, and one run behind them all."""
    lines = [text(i, 14) for i in range(num_fields)]

    def log(seed: int) -> Tokens:
        stamped = (join(text(seed + i, 2), line) for i, line in enumerate(lines))
        return join(text(99_999, 60), *stamped, text(99_998, 800))

    index = ContentIndex(CoreConfig(), lexicon=LEXICON)
    publish(index, log(10_000))
    plan = plan_of(index, log(50_000))
    if num_fields > MAX_ALIGNED_FIELDS:
        assert not plan.runs
        assert plan.dropped[DropReason.BUDGET]
    else:
        assert plan.runs
        assert len(plan.changed_fields) == num_fields
        assert DropReason.BUDGET not in plan.dropped


def test_generations_of_one_path_are_as_few_as_tell_them_all() -> None:
    """Steps that an earlier one implies are not kept, and what is kept says the same at each position."""
    index = ContentIndex(CoreConfig())
    path = text(0, 400)
    publish(index, path)
    rng = np.random.default_rng(1)
    told: list[tuple[int, int]] = []
    for _ in range(300):
        steps = [(int(rng.integers(0, 400)), int(rng.integers(0, 4))) for _ in range(3)]
        publish_rows(index, "a", path, [], generations=steps)
        told += steps
    check(index)
    (node,) = index._ages.values()
    assert len(node.generations) <= 3
    for end in range(401):
        assert node.generation(end) == max((number for start, number in told if start < end), default=0)


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
    "long paths": lambda rng: paths(rng, 2, 40_000),
    "paths of 600": lambda rng: paths(rng, 80, 600),
    "paths of 60": lambda rng: paths(rng, 300, 60),
    "conversations": lambda rng: conversations(rng, 6, 15, 400),
    "conversations of short turns": lambda rng: conversations(rng, 6, 40, 40),
    "equal text": lambda rng: equal_text(rng, 25),
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
        publish_rows(index, "a", path, [(known_len, len(path))])
    return index


@pytest.mark.parametrize("kind", WORKLOADS)
def test_the_estimate_is_what_is_allocated_and_bounds_it(kind: str) -> None:
    """With room for all, and with eviction all the time."""
    index, num_bytes = traced(lambda: fill(kind))
    assert num_bytes / FACTOR <= index.num_bytes <= num_bytes * FACTOR
    if kind in LONG_ENOUGH:
        assert num_bytes <= BYTES_PER_TOKEN * index.num_tokens
    config = CoreConfig(seam_tokens=1, tail_tokens=0, max_index_bytes=200_000)
    index, num_bytes = traced(lambda: fill(kind, config))
    assert index.num_evicted_tokens > 0
    assert num_bytes <= FACTOR * config.max_index_bytes
