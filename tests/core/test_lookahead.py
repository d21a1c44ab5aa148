"""The index where the tree names a row by more than the tokens up to it: by those of its page, or by the next one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import replace
from pic_bench.probe_plugin.invariants import check

from sglang_pic.core import ContentIndex, Path, RowNames, Tokens, intersect_spans
from tests.helpers.core_builders import CONFIG, Rows, join, plan_of, rows_of, text

NEXT_TOKEN = RowNames(lookahead=1)
# Two paths that part at 50.
PATHS = [join(text(91, 50), text(92 + number, 80)) for number in range(2)]
ALL_NAMES = [RowNames(), NEXT_TOKEN, RowNames(16), RowNames(16, 1)]


def is_eligible(index: ContentIndex, path: Tokens, position: int) -> bool:
    """Whether the row at a position of a path may be donated."""
    return rows_of(index)["a", path[: position + 1].tobytes(), position][0]


@pytest.mark.parametrize("names", [NEXT_TOKEN, RowNames(16)], ids=["next token", "page"])
def test_a_row_that_two_paths_have_each_of_their_own_is_no_donor_for_either(names: RowNames) -> None:
    """Where a row's name ends behind the row, a path that branches off has its own row of the last token they share."""
    index = ContentIndex(CONFIG, names=names, row_lookahead=names.lookahead)
    start, _ = names.parted(50)
    # The first path's own row there came from a splice, as the 20 before it did.
    index.publish("a", PATHS[0], [(0, 30), (50, 130)], spliced=[(30, 50)])
    index.publish("a", PATHS[1], [(start, 130)])
    assert [is_eligible(index, PATHS[0], position) for position in (29, 47, 49, 50)] == [True, False, False, True]
    index.flush()
    index.publish("a", PATHS[1], [(0, 130)])
    index.publish("a", PATHS[0], [(start, 130)], spliced=[(start, 50)], approximate=[(start, 130)])
    assert [index.exactness("a", path).approximate_len for path in PATHS] == [80, 0]


@pytest.mark.parametrize("names", ALL_NAMES, ids=str)
def test_a_path_that_the_tree_has_lost_takes_no_others_along(names: RowNames) -> None:
    """It begins in the middle of a page that it shares with another: each has rows of its own there."""
    index = ContentIndex(CONFIG, names=names, row_lookahead=names.lookahead)
    (lost, kept), (rest, _), asked = PATHS, names.parted(50), []
    index.publish("a", lost, [(0, 120)])
    index.publish("a", kept, [(rest, 120)])

    def resolve(path: Path, end: int) -> int:
        asked.append(path.tokens(51))
        return rest + names.lookahead if np.array_equal(asked[-1], lost[:51]) else end

    def spliced(path: Tokens) -> int:
        plan = plan_of(index, text(95, 20), path[:120], resolve=resolve)
        return sum(run.num_tokens for run in plan.runs)

    expected = spliced(kept)
    assert expected > 60
    assert spliced(lost) < 60
    check(index)
    assert spliced(kept) == expected
    assert len(asked) > 2


def prompts(rng: random.Random, past: list[Tokens]) -> Tokens:
    """Pieces of a few texts, often behind what came before, so that paths part in many places."""
    pieces = [rng.choice(past)[: rng.randrange(1, 120)]] if past and rng.random() < 0.6 else []
    for _ in range(rng.randint(1, 3)):
        start = rng.choice((0, 0, 40, rng.randrange(100)))
        pieces.append(text(rng.randrange(4), 120)[start : start + rng.choice((12, 20, 30, 80))])
    return np.concatenate(pieces)


@pytest.mark.parametrize("max_index_tokens", [400, 100_000])
@pytest.mark.parametrize("names", [*ALL_NAMES, RowNames(64)], ids=str)
def test_every_row_that_a_plan_reads_was_computed_at_its_place(names: RowNames, max_index_tokens: int) -> None:
    """Over requests and evictions as the adapter tells of them."""
    sizes = {"seam_tokens": 0, "sink_tokens": 0, "min_spliced_tokens": 1, "max_index_tokens": max_index_tokens}
    index = ContentIndex(replace(CONFIG, **sizes), names=names, row_lookahead=names.lookahead)
    rng, tree, past, num_read = random.Random(1), Rows(names), list[Tokens](), 0
    for _ in range(250):
        if past and rng.random() < 0.12:
            path = rng.choice(past)
            tree.evict("a", path, rng.randrange(len(path)) // names.page_size * names.page_size)
        tokens = prompts(rng, past)
        matched = tree.resident("a", tokens)
        length = (len(tokens) - names.lookahead) // names.page_size * names.page_size
        if matched >= length:
            continue
        runs = plan_of(index, tokens, prefix_len=matched, resolve=tree.resolve).runs if rng.random() < 0.7 else ()
        for run in runs:
            path = run.donor.tokens()
            rows = [tree.computed.get(tree.name("a", path, at)) for at in range(run.donor_start, run.donor_end)]
            assert all(rows), "a donor's rows were computed in place"
            num_read += len(rows)
        spliced = intersect_spans([(run.target_start, run.target_end) for run in runs], matched, length)
        path = tokens[: length + names.lookahead]
        tree.insert("a", path, [(matched, length)], spliced)
        index.publish("a", path, [(matched, length)], spliced=spliced)
        check(index)
        past = [*past[-25:], path]
    assert num_read
