"""The context rule: how a donor's context is compared, and how near to a prompt's end it lets rows be spliced."""

from __future__ import annotations

import numpy as np
import pytest
from core_builders import index_of, join, plan_of
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.core import CoreConfig, PlanOptions, ReusePolicy, Tokens, as_tokens
from sglang_pic.core.context import ContextRule, Misfit, compare_contexts

POLICY = ReusePolicy(
    tail_tokens=100, near_tokens=300, foreign_tokens=8, unseen_percent=10, near_unseen_percent=40, max_misfits=2
)
LAST = 1_000

tokens = st.lists(st.integers(0, 3), max_size=30).map(as_tokens)


@given(tokens, tokens, st.sets(st.integers(-20, 20), max_size=3))
def test_a_token_is_missing_unless_it_stands_at_one_of_the_shifts(
    context: Tokens, here: Tokens, shifts: set[int]
) -> None:
    def stands(token: int, places: list[int], others: Tokens) -> bool:
        return any(0 <= place < len(others) and others[place] == token for place in places)

    misfit = compare_contexts(context, here, shifts)
    at = [[place + shift for shift in shifts] for place in range(len(context))]
    assert misfit.num_foreign == sum(not stands(context[i], at[i], here) for i in range(len(context)))
    back = [[place - shift for shift in shifts] for place in range(len(here))]
    missing = sum(not stands(here[i], back[i], context) for i in range(len(here)))
    assert misfit.num_unseen == max(missing, len(here) - len(context))


def test_one_token_of_the_context_may_stand_for_several_but_not_for_more_text_than_it_has() -> None:
    assert compare_contexts(as_tokens([7]), as_tokens([7, 7, 7]), {0, 1, 2}) == Misfit(0, 2)


@pytest.mark.parametrize(
    ("end", "num_foreign", "num_unseen", "reach"),
    [
        (950, 0, 0, 950),
        (950, 8, 50, 950),
        (950, 9, 50, 900),
        (950, 8, 51, 900),
        (950, 9, 200, 900),
        (950, 0, 201, 700),
        (880, 999, 200, 880),
        (880, 0, 201, 700),
    ],
)
def test_the_better_the_context_fits_the_nearer_to_the_end(
    end: int, num_foreign: int, num_unseen: int, reach: int
) -> None:
    rule = ContextRule(POLICY, LAST)
    assert rule.near_start == 700
    assert rule.reach(end, Misfit(num_foreign, num_unseen), 500) == reach


def test_only_donors_that_are_cut_short_count_as_misfits() -> None:
    rule = ContextRule(POLICY, LAST)
    for _ in range(5):
        rule.reach(890, Misfit(999, 100), 500)
    assert not rule.is_exhausted
    for is_exhausted in (False, True):
        rule.reach(910, Misfit(999, 100), 500)
        assert rule.is_exhausted is is_exhausted


def test_without_a_tail_every_context_fits() -> None:
    assert ContextRule(ReusePolicy(tail_tokens=0), LAST).near_start == LAST


@pytest.mark.parametrize(("pinned", "spliced"), [(None, 0), (0, 0), (500, 278), (700, 368)])
def test_pinned_rows_are_spliced_near_the_end_as_far_as_they_are_pinned(pinned: int | None, spliced: int) -> None:
    """A block of 400 tokens behind 190 others; the prompt has it behind 600 that the donor lacks, 10 before the end."""
    rng = np.random.default_rng(7)
    block, donor_head, head, question = (as_tokens(rng.integers(3, 50_000, n)) for n in (400, 190, 600, 10))
    index = index_of(join(donor_head, block), config=CoreConfig())
    options = PlanOptions(pinned_len=None if pinned is None else lambda donor: min(pinned, len(donor)))
    plan = plan_of(index, head, block, question, options=options)
    assert plan.num_spliced == spliced
    assert all(run.target_start - run.donor_start == 410 and run.seam_len == 32 for run in plan.runs)
