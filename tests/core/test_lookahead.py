"""The index where the tree names a row by more than the tokens up to it: by those of its page, or by the next one."""

from __future__ import annotations

import numpy as np
import pytest
from pic_bench.probe_plugin.invariants import check

from sglang_pic.core import ContentIndex, Path, RowNames, Tokens
from tests.helpers.core_builders import CONFIG, join, plan_of, publish_rows, rows_of, text

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
    publish_rows(index, "a", PATHS[0], [(0, 30), (50, 130)], spliced=[(30, 50)])
    publish_rows(index, "a", PATHS[1], [(start, 130)])
    assert [is_eligible(index, PATHS[0], position) for position in (29, 47, 49, 50)] == [True, False, False, True]
    index.flush()
    publish_rows(index, "a", PATHS[1], [(0, 130)])
    publish_rows(index, "a", PATHS[0], [(start, 130)], spliced=[(start, 50)], approximate=[(start, 130)])
    assert [index.exactness("a", path).approximate_len for path in PATHS] == [80, 0]


@pytest.mark.parametrize("names", ALL_NAMES, ids=str)
def test_a_path_that_the_tree_has_lost_takes_no_others_along(names: RowNames) -> None:
    """It begins in the middle of a page that it shares with another: each has rows of its own there."""
    index = ContentIndex(CONFIG, names=names, row_lookahead=names.lookahead)
    (lost, kept), (rest, _), asked = PATHS, names.parted(50), []
    publish_rows(index, "a", lost, [(0, 120)])
    publish_rows(index, "a", kept, [(rest, 120)])

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
