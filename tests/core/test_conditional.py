"""Text in another order with `reordered: attend`: which runs are conditional, and what they cost."""

from __future__ import annotations

import msgspec
import pytest

from sglang_pic.core import ContentIndex, CoreConfig, CostModel, DropReason, Plan, PlanOptions
from tests.helpers.core_builders import index_of, join, plan_of, publish, text

ATTEND = CoreConfig(reordered="attend")
HEAD, OTHER, QUESTION = text(1, 60), text(2, 90), text(3, 70)
DOCUMENTS = [text(seed, length) for seed, length in enumerate((300, 250, 400, 200), start=10)]


def documents(config: CoreConfig, *order: int, question: int = 70) -> tuple[ContentIndex, Plan]:
    index = index_of(join(OTHER, *DOCUMENTS), config=config)
    return index, plan_of(index, HEAD, *(DOCUMENTS[at] for at in order), QUESTION[:question])


def test_reordered_documents_are_conditional_and_may_end_near_the_prompts_end() -> None:
    _, plan = documents(ATTEND, 3, 1, 0, 2)
    assert [run.is_conditional for run in plan.runs] == [True] * 4
    # Each behind its seam; the last one up to the tail.
    assert [run.num_tokens for run in plan.runs] == [200 - 64, 250 - 64, 300 - 64, 400 - 64]
    assert not plan.dropped


def test_two_documents_leave_nothing_to_choose() -> None:
    _, plan = documents(ATTEND, 1, 0)
    assert plan.runs == ()
    assert plan.dropped == {DropReason.REORDERED: 2}


def test_text_in_its_order_is_not_conditional() -> None:
    _, ordered = documents(ATTEND, 0, 1, 2, 3)
    _, plain = documents(CoreConfig(), 0, 1, 2, 3)
    assert ordered.runs == plain.runs
    assert not ordered.conditional


@pytest.mark.parametrize("end", [500, 900])
def test_a_plan_that_is_cut_has_no_conditional_runs(end: int) -> None:
    _, plan = documents(ATTEND, 3, 1, 0, 2)
    assert plan.without_conditional().clip(end).runs == ()
    assert plan.without_conditional().gaps == ((0, plan.end),)


def test_text_that_follows_a_run_without_a_seam_is_computed_with_it() -> None:
    """A passage overlaps the one before it: its donor has the last tokens of that, and no seam is needed behind it."""
    index, _ = documents(ATTEND, 3, 1, 0, 2)
    passage = join(DOCUMENTS[0][-40:], text(20, 200))
    publish(index, OTHER, passage)
    plan = plan_of(index, HEAD, *(DOCUMENTS[at] for at in (2, 1, 3, 0)), passage[40:], text(3, 1200))
    *reordered, last = plan.runs
    assert [run.is_conditional for run in plan.runs] == [True] * 4 + [False]
    assert (last.seam_len, last.target_start) == (0, reordered[-1].target_end)
    assert plan.choices[-1] == (reordered[-1].target_start - 64, last.target_end, reordered[-1].num_tokens + 200)
    assert plan.without_conditional().runs == ()


def test_the_second_pass_computes_the_longest_run_at_most() -> None:
    _, plan = documents(ATTEND, 3, 1, 0, 2)
    assert plan.num_spliced - plan.after_second_pass().num_spliced == 400 - 64


def test_a_budget_is_charged_the_longer_pass() -> None:
    index, plan = documents(ATTEND, 3, 1, 0, 2)
    first, second = 60 + 4 * 64 + 70, 400 + 70
    assert (plan.num_computed, plan.num_charged, plan.num_spared) == (first, second, plan.end - second)
    plain = plan_of(index, HEAD, *DOCUMENTS, QUESTION)
    assert (plain.num_charged, plain.num_spared) == (plain.num_computed, plain.num_spliced)


def test_the_cost_gate_prices_both_passes() -> None:
    cost = CostModel(computed_token_us=10, spliced_token_us=0, gap_us=5, request_us=20, floor_us=300)
    _, plan = documents(ATTEND, 3, 1, 0, 2)
    again = 10 * (400 + len(QUESTION))
    one_pass = msgspec.structs.replace(
        plan, runs=tuple(msgspec.structs.replace(r, is_conditional=False) for r in plan.runs)
    )
    assert one_pass.saved_us(cost, num_fetched=0) - plan.saved_us(cost, num_fetched=0) == again + 20 + 5


def test_reuse_that_the_second_pass_eats_up_is_none() -> None:
    slow = CostModel(computed_token_us=10, spliced_token_us=0, gap_us=0, gap_floor_us=9_000)
    index, _ = documents(ATTEND, 3, 1, 0, 2)
    prompt = join(HEAD, *(DOCUMENTS[at] for at in (3, 1, 0, 2)), QUESTION)
    plan = plan_of(index, prompt[:0], prompt, options=PlanOptions(cost=slow))
    assert plan.runs == ()
    assert plan.dropped[DropReason.COST_GATE]
