"""A donor's context beside the text before a run: changed fields, the context rule, how near to a prompt's end."""

from __future__ import annotations

import pytest

from sglang_pic.core import ContentIndex, Context, CoreConfig, DropReason, PlanOptions, Tokens, context
from sglang_pic.core.alignment import Aligner
from sglang_pic.core.trie import Node
from tests.helpers.core_builders import index_of, join, plan_of, publish_rows, text


@pytest.mark.parametrize(("pinned", "spliced"), [(0, 0), (400, 146), (500, 246), (570, 316), (700, 336)])
def test_pinned_rows_are_spliced_near_the_end_as_far_as_they_are_pinned(pinned: int, spliced: int) -> None:
    """A block of 400 tokens behind 190 others; the prompt has it behind 600 that the donor lacks, 10 before the end."""
    block, donor_head, head, question = (text(seed, n) for seed, n in enumerate((400, 190, 600, 10), start=7))
    index = index_of(join(donor_head, block), config=CoreConfig())
    plan = plan_of(index, head, block, question, pinned=pinned)
    assert plan.num_spliced == spliced
    assert all(run.target_start - run.donor_start == 410 and run.seam_len == 64 for run in plan.runs)


MOST = 64
HEAD, BODY, MORE, END, FOREIGN, OLD, NEW = (text(*each) for each in enumerate((100, 200, 150, 120, 400, MOST, MOST)))


def aligner(donor: list[Tokens], prompt: list[Tokens]) -> tuple[Aligner, Node]:
    """For a path of an index, which ends in the node, and for a prompt."""
    index, path = ContentIndex(CoreConfig()), join(*donor)
    publish_rows(index, "a", path, [(0, len(path))])
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


SHARED, ASKED, NOW, THEN = (text(*each) for each in ((20, 1500), (21, 900), (22, 700), (23, 700)))
ALIKE = {
    "after another header": ([THEN[:40]], [NOW[:90]], (64, 64)),
    "after another task": ([SHARED[:100], THEN[:400]], [SHARED[:100], NOW[:400]], (256, 512)),
    "after text that is gone": ([SHARED[:300], THEN[:120], SHARED[300:600]], [SHARED[:600]], (64, 64)),
    "after more of it": ([SHARED[:300], THEN[:140], SHARED[300:600]], [SHARED[:600]], (512 - 300, 512)),
    "after a little new text": ([SHARED[:600]], [SHARED[:600], NOW[:90]], (64, 64)),
    "after new text": ([SHARED[:600]], [SHARED[:600], NOW[:100]], (256, 64)),
    "after much new text": ([SHARED[:600]], [SHARED[:600], NOW[:500]], (256, 64)),
    "after new text some way in front": ([SHARED], [SHARED[:800], NOW[:500], SHARED[800:]], (64, 64)),
    "after more new text than old": ([SHARED[:600]], [SHARED[:600], NOW[:700]], (256, 512)),
    "after two texts in another order": ([SHARED[:300], SHARED[400:700]], [SHARED[400:700], SHARED[:300]], (64, 64)),
}
"""The donor's text, the prompt's, and what is computed of the text behind it: first tokens, and last ones."""


@pytest.mark.parametrize("name", ALIKE)
def test_near_the_end_a_donor_must_have_read_much_the_same_text(name: str) -> None:
    old, new, (seam, tail) = ALIKE[name]
    index = index_of(join(*old, ASKED), config=CoreConfig(edit="in_place", reordered="splice"))
    plan = plan_of(index, *new, ASKED, NOW[-10:])
    asked = [run for run in plan.runs if run.target_end > sum(map(len, new))]
    start, end = asked[0].target_start - sum(map(len, new)), plan.end - asked[-1].target_end
    assert end == tail
    # A run that begins before it is further from the end than its first tokens matter.
    assert start < 0 or start == seam


def test_after_another_text_that_is_far_from_the_end_only_the_end_is_computed() -> None:
    far = text(24, 1500)
    index = index_of(join(THEN[:400], far), config=CoreConfig(edit="in_place"))
    (run,) = plan_of(index, NOW[:400], far, NOW[-10:]).runs
    assert (run.target_start, run.target_end) == (400 + 64, 400 + 1500 + 10 - 512)


@pytest.mark.parametrize("num_asked", [10, 650])
@pytest.mark.parametrize(
    ("num_old", "num_new", "num_same", "seam"),
    [(790, 300, 0, 512), (770, 300, 0, 64), (130, 0, 0, 512), (120, 0, 0, 64), (660, 300, 80, 512), (650, 300, 80, 64)],
)
def test_behind_text_that_is_gone_a_seam_is_longer_however_far_the_end_is(
    num_old: int, num_new: int, num_same: int, seam: int, num_asked: int
) -> None:
    """A summary has replaced 2.6 times as many tokens, or more; it quotes some."""
    far, old, new = text(24, 1500), text(25, 1000)[:num_old], NOW[:num_new].copy()
    if num_same:
        new[-100 : num_same - 100] = old[-100 : num_same - 100]
    index = index_of(join(SHARED[:100], old, far), config=CoreConfig(max_field_tokens=0))
    run = plan_of(index, SHARED[:100], new, far, NOW[-num_asked:]).runs[-1]
    end, tail = 100 + num_new + 1500 + num_asked, max(512 if num_old > 128 and num_asked == 10 else 64, num_asked)
    assert (run.target_start, run.target_end) == (100 + num_new + seam, end - tail)


def test_text_that_an_earlier_run_shares_with_its_donor_is_not_new() -> None:
    """The second run has a shift of its own, at which all text before it is new."""
    first, far, old = text(24, 400), text(25, 700), text(26, 1700)
    index = index_of(join(SHARED[:300], old[:200], first, old[200:], far), config=CoreConfig(max_field_tokens=0))
    run = plan_of(index, SHARED[:300], first, NOW[:300], far, ASKED).runs[-1]
    assert (run.target_start, run.target_end) == (300 + 400 + 300 + 512, 300 + 400 + 300 + 700)


def test_contexts_of_many_runs_of_a_donor_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other text between them, so that none is gone."""
    monkeypatch.setattr(context, "_MOST_COMPARED", 8)
    parts = [text(seed, 130) for seed in range(600, 660)]
    index = index_of(
        join(THEN[:100], *(each for at, part in enumerate(parts) for each in (text(2000 + at, 3000), part))),
        config=CoreConfig(max_field_tokens=0, seam_tokens=1),
    )
    plan = plan_of(index, *(each for at, part in enumerate(parts) for each in (text(1000 + at, 3000), part)), ASKED)
    assert [run.num_tokens for run in plan.runs] == [129] * len(parts)


@pytest.mark.parametrize(("num_parts", "num_longer"), [(60, 0), (300, 1)])
def test_contexts_that_are_too_many_to_compare_count_as_gone(num_parts: int, num_longer: int) -> None:
    """Each run is at a shift of its own, after as much new text as is gone; one long seam is for all that are left."""
    parts, gaps = [text(seed, 130) for seed in range(600, 600 + num_parts)], [text(seed, 7) for seed in range(300)]
    config = CoreConfig(max_field_tokens=0, seam_tokens=1)
    old, new = (
        [each for part in zip(side, parts, strict=False) for each in part] for side in ([*gaps], [g[:5] for g in gaps])
    )
    plan = plan_of(index_of(join(*old), config=config), SHARED[:100], *new, text(26, 1500))
    starts, ends = ([getattr(run, name) for run in plan.runs] for name in ("target_start", "target_end"))
    assert sum(start - end > 200 for start, end in zip(starts[1:], ends, strict=False)) == num_longer


def test_after_another_text_each_token_is_computed_once_for_all_runs_of_a_donor() -> None:
    """The window reaches into the second of two runs, which a short text divides that the donor lacks."""
    index = index_of(join(THEN[:400], ASKED[:200], ASKED[200:]), config=CoreConfig(edit="in_place"))
    runs = plan_of(index, NOW[:400], ASKED[:200], NOW[600:640], ASKED[200:], NOW[-10:]).runs
    assert [run.target_start for run in runs] == [400 + 200 + 40 + 64]


@pytest.mark.parametrize(("num", "computed"), [(40, 64), (100, 256)])
def test_a_short_text_between_two_runs_of_a_donor_needs_no_second_window(num: int, computed: int) -> None:
    """The window after new text reaches into the second run; behind 96 new tokens more that has one of its own."""
    index = index_of(join(SHARED[:600], ASKED), config=CoreConfig(edit="in_place"))
    prompt = SHARED[:600], NOW[:100], ASKED[:200], NOW[500 : 500 + num], ASKED[200:], NOW[-10:]
    assert plan_of(index, *prompt).runs[-1].target_start == 600 + 100 + 200 + num + computed


@pytest.mark.parametrize(
    ("order", "spliced"),
    [
        ([0, 1, 2, 3], {0, 1, 2, 3}),
        ([0, 2, 3], {0, 2, 3}),
        ([1, 0, 2, 3], {2, 3}),
        ([3, 2, 1, 0], set()),
        ([2, 3, 0, 1], set()),
    ],
)
def test_documents_in_another_order_are_computed(order: list[int], spliced: set[int]) -> None:
    head, new_head, question, *texts = (text(seed, n) for seed, n in enumerate((100, 60, 600, *[700] * 4), start=40))
    index = index_of(join(head, *texts), config=CoreConfig())
    prompt = join(new_head, *(texts[i] for i in order), question)
    for reordered, wanted in (("compute", spliced), ("splice", {*order})):
        policy = CoreConfig(edit="in_place", reordered=reordered)
        plan = plan_of(index, prompt, options=PlanOptions(policy=policy))
        starts = {i: len(new_head) + 700 * at for at, i in enumerate(order)}
        found = {
            i for i, at in starts.items() if any(run.target_start < at + 600 < run.target_end for run in plan.runs)
        }
        assert found == wanted
        assert (DropReason.REORDERED in plan.dropped) == (wanted != {*order})


def test_a_run_behind_one_that_goes_gets_a_seam() -> None:
    """It went on in the context of that one."""
    head, new_head, question, *texts = (text(seed, n) for seed, n in enumerate((100, 60, 700, *[700] * 3), start=80))
    moved, kept, last = texts
    index = index_of(join(head, kept, moved), join(moved[-100:], last), config=CoreConfig(edit="in_place"))
    prompt = join(new_head, moved, last, kept, question)
    policies = (CoreConfig(edit="in_place", reordered=each) for each in ("splice", "compute"))
    found = [plan_of(index, prompt, options=PlanOptions(policy=policy)).runs for policy in policies]
    assert [[(run.target_start, run.seam_len) for run in runs] for runs in found] == [
        [(572, 512), (760, 0), (1524, 64)],
        [(824, 64)],
    ]
