"""What one tenant can publish must not make the plans of others in its namespace slow, whatever it does with fields.

Work that a plan counts is no proof that it is bounded, so the lines of Python are counted that a plan executes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from core_builders import join, plan_of

from sglang_pic.core import ContentIndex, CoreConfig, DropReason, Tokens
from sglang_pic.core.alignment import MAX_ALIGNED_FIELDS
from sglang_pic.core.invariants import check
from tests.fuzz.attacks import ATTACKS, LEXICON, fields_in_every_line, publish, text


def lines_executed(call: Callable[[], object]) -> int:
    """How many lines of Python a call executes, its callees' and each turn of a comprehension with them."""
    num_lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_lines
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
    assert num_lines <= 6 * index.stats().num_work + 100_000, "nothing is done that is not counted"
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
        index.publish("a", path, [], generations=steps)
        told += steps
    check(index)
    (node,) = index._ages.values()
    assert len(node.generations) <= 3
    for end in range(401):
        assert node.generation(end) == max((number for start, number in told if start < end), default=0)
