"""Inputs that are meant to hurt: no text, hash, trie or bound may make the core wrong, unsound or slow.

Work is counted, not timed: tokens compared and donors looked at (`ContentIndex.num_work`), names taken, paths joined.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pic_bench.probe_plugin.invariants import check

from sglang_pic.core import MOST_REUSE, ContentIndex, CoreConfig, Tokens, as_tokens
from sglang_pic.core.chunker import xxh3_name
from sglang_pic.core.plan import CostModel, DropReason, PlanOptions
from tests.helpers.core_builders import CLOSE, index_of, join, plan_of, publish, text

UNBOUNDED = CoreConfig(edit="in_place", seam_tokens=1, tail_tokens=0, max_index_tokens=1 << 40, max_index_bytes=1 << 44)


class CountingHash:
    """Names chunks and counts the calls."""

    num_calls = 0

    def __call__(self, data: memoryview) -> int:
        self.num_calls += 1
        return xxh3_name(data)


MILLION = 1_000_000
LONG: dict[str, Callable[[], Tokens]] = {
    "one token": lambda: as_tokens(np.full(MILLION, 7)),
    "period 2": lambda: np.resize(as_tokens([7, 8]), MILLION),
    "period 3": lambda: np.resize(as_tokens([7, 8, 9]), MILLION),
    "period 64": lambda: np.resize(text(0, 64), MILLION),
    "one message": lambda: np.resize(join(CLOSE, text(0, 40)), MILLION),
    "two ids at random": lambda: as_tokens(np.random.default_rng(0).integers(5, 7, MILLION)),
    "noise": lambda: text(0, MILLION),
    "noise and repeats": lambda: np.hstack([np.tile(text(0, 64), (15_000, 1)), text(1, 45_000).reshape(-1, 3)]).ravel(),
}


# Beside the settings what a plan may do for each token, and how many it may leave: with the defaults the tail too.
@pytest.mark.parametrize(
    ("config", "most_work", "most_computed"),
    [(MOST_REUSE, 8, 200), (CoreConfig(edit="in_place"), 10, 1_100)],
    ids=["most", "defaults"],
)
@pytest.mark.parametrize("kind", LONG)
def test_a_million_tokens_are_linear_work(kind: str, config: CoreConfig, most_work: int, most_computed: int) -> None:
    tokens = LONG[kind]()
    hash_function = CountingHash()
    index = ContentIndex(config, hash_function=hash_function)
    publish(index, text(1, 50), tokens)
    # One for each chunk, none of which is looked up if it has fewer than eight tokens.
    assert hash_function.num_calls <= MILLION / 8 + 10
    hash_function.num_calls = 0
    plan = plan_of(index, text(2, 70), tokens, text(3, 9))
    assert index.num_work <= most_work * MILLION
    assert hash_function.num_calls <= MILLION / 100
    assert plan.num_computed <= most_computed
    assert len(plan.runs) <= 4
    hash_function.num_calls = 0
    work = index.num_work
    assert not plan_of(index, text(4, MILLION)).runs, "nothing of it was ever there"
    assert index.num_work - work <= MILLION / 100
    assert hash_function.num_calls <= MILLION / 1_000


def test_a_search_that_has_used_up_its_budget_ends_and_says_so() -> None:
    """One token again and again, behind two headers: donors near the end are looked at at every place."""
    tokens = as_tokens(np.full(4_000, 7))
    config = CoreConfig(edit="in_place", tail_tokens=3_000)
    index = index_of(join(text(40, 40), tokens), join(text(55, 55), tokens), config=config)
    plan = plan_of(index, text(70, 70), tokens)
    assert plan.dropped[DropReason.BUDGET] == 1
    assert plan.num_computed < 3_500
    check(index)


@pytest.mark.parametrize("length", [100, 400, 1_600])
def test_spans_that_do_not_pay_are_looked_at_once(length: int) -> None:
    """Not once for every chunk in them: what pays behind them must still be found."""
    bodies = [text(i, length) for i in range(32_000 // length)]
    index = ContentIndex(UNBOUNDED)
    for copy in range(4):
        parts = [join(body, text(10_000 + 4 * i + copy, 5)) for i, body in enumerate(bodies)]
        publish(index, text(9_000 + copy, 50), *parts)
    long = text(8_000, 4_000)
    publish(index, text(8_001, 50), long)
    cost = CostModel(computed_token_us=2.0, spliced_token_us=1.0, gap_us=2_000.0)
    prompt = join(text(7_000, 60), *(join(body, text(20_000 + i, 5)) for i, body in enumerate(bodies)), long)
    plan = plan_of(index, prompt, options=PlanOptions(cost=cost))
    assert [run.num_tokens for run in plan.runs] == [3_998]
    assert index.num_work <= 24 * len(prompt)
    assert plan.dropped[DropReason.COST_GATE] <= 4 * len(bodies)
