"""Alignment of a donor's context with the text before a run: which differences are changed fields."""

from __future__ import annotations

import numpy as np
import pytest
from core_builders import join

from sglang_pic.core import ContentIndex, Context, CoreConfig, Tokens, as_tokens
from sglang_pic.core.alignment import Aligner

RNG = np.random.default_rng(5)
MOST = 64


def text(length: int) -> Tokens:
    return as_tokens(RNG.integers(3, 50_000, length))


HEAD, BODY, MORE, END, FOREIGN = text(100), text(200), text(150), text(120), text(400)
OLD, NEW = text(MOST), text(MOST)


def align(donor: list[Tokens], prompt: list[Tokens], block: Tokens = END) -> tuple[Context, list[tuple[int, int, int]]]:
    """Context of `block` at the end of both, and each field as length before and span now."""
    index = ContentIndex(CoreConfig())
    path, tokens = (join(*parts, block) for parts in (donor, prompt))
    index.publish("a", path, [(0, len(path))])
    trie = index._namespaces["a"].trie
    leaf = trie.walk(path)[0]
    start = len(tokens) - len(block)
    found = Aligner(trie, tokens, MOST).align(leaf, start, len(tokens) - len(path))
    return found.context, [(len(field.old), *field.new) for field in found.fields]


@pytest.mark.parametrize(
    ("old", "new"), [(1, 1), (1, 5), (5, 1), (MOST, MOST), (1, MOST), (0, 3), (3, 0)], ids=lambda n: f"{n}"
)
def test_a_small_difference_between_equal_flanks_is_a_changed_field(old: int, new: int) -> None:
    found = align([HEAD, OLD[:old], BODY], [HEAD, NEW[:new], BODY])
    assert found == (Context.CHANGED, [(old, 100, 100 + new)])


def test_several_fields_of_unequal_length_are_told_apart() -> None:
    found = align([HEAD, OLD[:2], BODY, OLD[2:9], MORE], [HEAD, NEW[:5], BODY, NEW[5:6], MORE])
    assert found == (Context.CHANGED, [(2, 100, 105), (7, 305, 306)])


def test_a_field_at_the_very_beginning_is_one() -> None:
    assert align([OLD[:3], BODY], [NEW[:4], BODY]) == (Context.CHANGED, [(3, 0, 4)])


def test_the_same_context_is_no_change() -> None:
    assert align([HEAD, BODY], [HEAD, BODY]) == (Context.SAME, [])


@pytest.mark.parametrize("length", [MOST // 4 + 1, MOST + 1, 400])
def test_a_long_text_added_or_taken_away_is_moved_text(length: int) -> None:
    assert align([HEAD, BODY], [HEAD, FOREIGN[:length], BODY]) == (Context.MOVED, [])
    assert align([HEAD, FOREIGN[:length], BODY], [HEAD, BODY]) == (Context.MOVED, [])


def test_another_text_is_neither() -> None:
    assert align([HEAD, FOREIGN[:200]], [HEAD, FOREIGN[200:]]) == (Context.OTHER, [])
    assert align([FOREIGN[:200]], [FOREIGN[200:]]) == (Context.OTHER, [])


def test_a_field_in_front_of_documents_in_another_order_is_found_for_each_of_them() -> None:
    for first, second in ((BODY, MORE), (MORE, BODY)):
        context, fields = align([HEAD, OLD[:3], first], [HEAD, NEW[:3], second, first])
        assert context is Context.CHANGED
        assert fields[0][1] == 100


def test_a_field_behind_other_text_is_found() -> None:
    donor, prompt = [HEAD, FOREIGN[:200], BODY, OLD[:2], MORE], [HEAD, FOREIGN[200:], BODY, NEW[:4], MORE]
    assert align(donor, prompt) == (Context.CHANGED, [(2, 500, 504)])


def test_what_is_known_of_a_path_serves_a_run_further_on() -> None:
    index = ContentIndex(CoreConfig())
    path = join(HEAD, OLD[:2], BODY, OLD[2:5], MORE)
    tokens = join(HEAD, NEW[:2], BODY, NEW[2:5], MORE)
    index.publish("a", path, [(0, len(path))])
    trie = index._namespaces["a"].trie
    leaf = trie.walk(path)[0]
    aligner = Aligner(trie, tokens, MOST)
    first = aligner.align(leaf, 150, 0)
    work = aligner.work
    again = aligner.align(leaf, 400, 0)
    assert [field.new for field in first.fields] == [(100, 102)]
    assert [field.new for field in again.fields] == [(100, 102), (302, 305)]
    assert aligner.align(leaf, 420, 0).fields == again.fields
    assert aligner.work - work < 3 * 1_000
