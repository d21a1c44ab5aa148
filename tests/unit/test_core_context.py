"""A donor's context beside the text before a run: changed fields, the context rule, how near to a prompt's end."""

from __future__ import annotations

import pytest
from core_builders import index_of, join, plan_of, text
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_pic.core import ContentIndex, Context, CoreConfig, DropReason, PlanOptions, ReusePolicy, Tokens, as_tokens
from sglang_pic.core.alignment import Aligner
from sglang_pic.core.context import ContextRule, Misfit, Moved, compare_contexts
from sglang_pic.core.trie import Node

POLICY = ReusePolicy(
    tail_tokens=100, near_tokens=300, foreign_tokens=8, unseen_percent=10, near_unseen_percent=40, max_misfits=2
)
LAST = 1_000

tokens = st.lists(st.integers(0, 3), max_size=30).map(as_tokens)


PARTS = st.lists(st.builds(Moved, st.integers(-5, 25), st.integers(-5, 35), st.integers(-20, 20)), max_size=3)


@example(as_tokens([7]), as_tokens([7, 7, 7]), {0, 1, 2}, [])
@given(tokens, tokens, st.sets(st.integers(-20, 20), max_size=3), PARTS)
def test_a_token_is_missing_unless_it_stands_at_a_shift(
    context: Tokens, here: Tokens, shifts: set[int], moved: list[Moved]
) -> None:
    misfit = compare_contexts(context, here, shifts, moved)
    places = [*(Moved(0, len(here), shift) for shift in shifts), *moved]
    pairs = [
        (place - shift, place)
        for start, end, shift in places
        for place in range(max(0, start), min(end, len(here)))
        if 0 <= place - shift < len(context) and context[place - shift] == here[place]
    ]
    assert misfit.num_foreign == len(context) - len({old for old, _ in pairs})
    missing = len(here) - len({new for _, new in pairs})
    # One token may stand for several, but not for more text than the context has.
    assert misfit.num_unseen == max(missing, len(here) - len(context))


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
def test_a_context_that_fits_reaches_nearer(end: int, num_foreign: int, num_unseen: int, reach: int) -> None:
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
    assert ContextRule(ReusePolicy(tail_tokens=0), LAST).near_start == LAST, "without a tail every context fits"


@pytest.mark.parametrize(("pinned", "spliced"), [(None, 0), (0, 0), (500, 278), (700, 368)])
def test_pinned_rows_are_spliced_near_the_end_as_far_as_they_are_pinned(pinned: int | None, spliced: int) -> None:
    """A block of 400 tokens behind 190 others; the prompt has it behind 600 that the donor lacks, 10 before the end."""
    block, donor_head, head, question = (text(seed, n) for seed, n in enumerate((400, 190, 600, 10), start=7))
    index = index_of(join(donor_head, block), config=CoreConfig())
    options = PlanOptions(pinned_len=None if pinned is None else lambda donor: min(pinned, len(donor)))
    plan = plan_of(index, head, block, question, options=options)
    assert plan.num_spliced == spliced
    assert all(run.target_start - run.donor_start == 410 and run.seam_len == 32 for run in plan.runs)


MOST = 64
HEAD, BODY, MORE, END, FOREIGN, OLD, NEW = (text(*each) for each in enumerate((100, 200, 150, 120, 400, MOST, MOST)))


def aligner(donor: list[Tokens], prompt: list[Tokens]) -> tuple[Aligner, Node]:
    """For a path of an index, which ends in the node, and for a prompt."""
    index, path = ContentIndex(CoreConfig()), join(*donor)
    index.publish("a", path, [(0, len(path))])
    trie = index._namespaces["a"].trie
    return Aligner(trie, join(*prompt), MOST), trie.walk(path)[0]


def align(donor: list[Tokens], prompt: list[Tokens], block: Tokens = END) -> tuple[Context, list[tuple[int, int, int]]]:
    """Context of `block` at the end of both, and each field as length before and span now."""
    old_len, new_len = (sum(map(len, parts)) for parts in (donor, prompt))
    known, leaf = aligner([*donor, block], [*prompt, block])
    found = known.align(leaf, new_len, new_len - old_len)
    return found.context, [(len(field.old), *field.new) for field in found.fields]


@pytest.mark.parametrize(
    ("old", "new"), [(1, 1), (1, 5), (5, 1), (MOST, MOST), (1, MOST), (0, 3), (3, 0)], ids=lambda n: f"{n}"
)
def test_a_small_difference_between_equal_flanks_is_a_changed_field(old: int, new: int) -> None:
    found = align([HEAD, OLD[:old], BODY], [HEAD, NEW[:new], BODY])
    assert found == (Context.CHANGED, [(old, 100, 100 + new)])


DIFFERENCES = {
    "several fields of unequal length": (
        [HEAD, OLD[:2], BODY, OLD[2:9], MORE],
        [HEAD, NEW[:5], BODY, NEW[5:6], MORE],
        (Context.CHANGED, [(2, 100, 105), (7, 305, 306)]),
    ),
    "a field at the very beginning": ([OLD[:3], BODY], [NEW[:4], BODY], (Context.CHANGED, [(3, 0, 4)])),
    "a field behind other text": (
        [HEAD, FOREIGN[:200], BODY, OLD[:2], MORE],
        [HEAD, FOREIGN[200:], BODY, NEW[:4], MORE],
        (Context.CHANGED, [(2, 500, 504)]),
    ),
    "the same context": ([HEAD, BODY], [HEAD, BODY], (Context.SAME, [])),
    "another text": ([HEAD, FOREIGN[:200]], [HEAD, FOREIGN[200:]], (Context.OTHER, [])),
    "nothing else": ([FOREIGN[:200]], [FOREIGN[200:]], (Context.OTHER, [])),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_each_difference_is_what_it_is(name: str) -> None:
    donor, prompt, found = DIFFERENCES[name]
    assert align(donor, prompt) == found


@pytest.mark.parametrize("length", [MOST // 4 + 1, MOST + 1, 400])
def test_a_long_text_added_or_taken_away_is_moved_text(length: int) -> None:
    assert align([HEAD, BODY], [HEAD, FOREIGN[:length], BODY]) == (Context.MOVED, [])
    assert align([HEAD, FOREIGN[:length], BODY], [HEAD, BODY]) == (Context.MOVED, [])


def test_a_field_in_front_of_documents_in_another_order_is_found_for_each_of_them() -> None:
    for first, second in ((BODY, MORE), (MORE, BODY)):
        context, fields = align([HEAD, OLD[:3], first], [HEAD, NEW[:3], second, first])
        assert context is Context.CHANGED
        assert fields[0][1] == 100


def test_what_is_known_of_a_path_serves_a_run_further_on() -> None:
    known, leaf = aligner([HEAD, OLD[:2], BODY, OLD[2:5], MORE], [HEAD, NEW[:2], BODY, NEW[2:5], MORE])
    first = known.align(leaf, 150, 0)
    work = known.work
    again = known.align(leaf, 400, 0)
    assert [field.new for field in first.fields] == [(100, 102)]
    assert [field.new for field in again.fields] == [(100, 102), (302, 305)]
    assert known.align(leaf, 420, 0).fields == again.fields
    assert known.work - work < 3 * 1_000


@pytest.mark.parametrize(
    ("num_unseen", "first"), [(0, 200), (80, 200), (81, 203), (120, 300), (128, 320), (129, 700), (400, 700)]
)
def test_a_run_far_from_the_end_fits_behind_text_that_its_donor_read(num_unseen: int, first: int) -> None:
    """Or behind text as short as a field, such as another header, from where that is a small part."""
    assert ContextRule(POLICY, LAST).far_start(200, 600, num_unseen) == first


def test_far_from_the_end_no_more_is_compared_or_refused_than_many_lengths_of_the_prompt() -> None:
    for start, end, num_unseen, times in ((600, 700, 0, 38), (0, 600, 300, 5)):
        rule = ContextRule(POLICY, LAST)
        for _ in range(times - 1):
            rule.far_start(start, end, num_unseen)
        assert not rule.is_far_exhausted
        rule.far_start(start, end, num_unseen)
        assert rule.is_far_exhausted


@pytest.mark.parametrize(
    ("order", "spliced"),
    [
        ([0, 1, 2, 3], {0, 1, 2, 3}),
        ([0, 2, 3], {0, 2, 3}),
        ([1, 0, 2, 3], {0, 2, 3}),
        ([3, 2, 1, 0], {0}),
        ([2, 3, 0, 1], {0, 1}),
    ],
)
def test_a_text_is_computed_if_its_donor_read_first_what_is_after_it_now(order: list[int], spliced: set[int]) -> None:
    head, new_head, question, *texts = (text(seed, n) for seed, n in enumerate((100, 60, 1100, *[400] * 4), start=40))
    index = index_of(join(head, *texts), config=CoreConfig(edit="in_place"))
    prompt = join(new_head, *(texts[i] for i in order), question)
    for percent, wanted in ((10, spliced), (100, {*order})):
        policy = CoreConfig(edit="in_place", far_unseen_percent=100, reordered_percent=percent)
        plan = plan_of(index, prompt, options=PlanOptions(policy=policy))
        starts = {i: len(new_head) + 400 * at for at, i in enumerate(order)}
        found = {
            i for i, at in starts.items() if any(run.target_start < at + 300 < run.target_end for run in plan.runs)
        }
        assert found == wanted
        assert (DropReason.REORDERED in plan.dropped) == (wanted != {*order})


def test_only_text_of_the_donors_own_path_counts_as_read_before_it() -> None:
    """The same texts in their order from one donor each, of which the second one's has other text at those places."""
    head, other, first, second, question = (text(seed, n) for seed, n in enumerate((80, 500, 300, 300, 1100), start=60))
    index = index_of(join(head, second), join(other, first), config=CoreConfig(edit="in_place", far_unseen_percent=100))
    plan = plan_of(index, join(head[:60], first, second, question))
    assert (len(plan.runs), plan.dropped.get(DropReason.REORDERED)) == (2, None)


def test_pinned_rows_that_may_be_near_may_be_in_any_order() -> None:
    head, first, second, question = (text(seed, n) for seed, n in enumerate((80, 300, 300, 1100), start=70))
    index = index_of(join(head, first, second), config=CoreConfig(edit="in_place", far_unseen_percent=100))
    prompt = join(head[:60], second, first, question)
    for pinned_len, num_runs in ((None, 1), (lambda _: 680, 2)):
        options = PlanOptions(policy=CoreConfig(edit="in_place", far_unseen_percent=100), pinned_len=pinned_len)
        assert len(plan_of(index, prompt, options=options).runs) == num_runs


def test_a_changed_field_is_looked_at_before_the_order() -> None:
    """The guard notes the places of runs, and a run behind one that goes gets a seam."""
    head, old, new, a, b, c, question = (
        text(seed, n) for seed, n in enumerate((90, 3, 3, 300, 300, 300, 1100), start=80)
    )
    index = index_of(join(head, old, c, a), join(head, old, a[-100:], b), config=CoreConfig(edit="in_place"))
    policy = CoreConfig(far_unseen_percent=100, max_generation=9)
    plan = plan_of(index, join(head, new, a, b, c, question), options=PlanOptions(policy=policy))
    assert not plan.runs, "without a lexicon all that is behind a changed field is computed"
