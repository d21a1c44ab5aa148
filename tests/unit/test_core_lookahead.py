"""The index where rows depend on the next token too, as those of a draft model do."""

from __future__ import annotations

import numpy as np

from sglang_pic.core import ContentIndex
from tests.unit.test_core_index import CONFIG, rows_of, text


def test_a_row_that_two_paths_have_each_of_their_own_is_no_donor_for_either() -> None:
    """Where rows depend on the next token, a path that branches off has its own row of the last token they share."""
    index = ContentIndex(CONFIG, lookahead=1)
    shared = text(91, 50)
    ends = [np.concatenate([shared, text(92 + number, 80)]) for number in range(2)]
    # The first path's own row there came from a splice, as the 20 before it did.
    index.publish("a", ends[0], [(0, 30), (50, 130)], spliced=[(30, 50)])
    index.publish("a", ends[1], [(49, 130)])
    known = {end: rows_of(index)["a", ends[0][:end].tobytes()][0] for end in (30, 49, 50, 51)}
    assert known == {30: True, 49: False, 50: False, 51: True}
    # A path that ended there has no row by that name.
    index.publish("a", ends[1][:120], [(119, 120)])
    index.publish("a", np.concatenate([ends[1], text(95, 10)]), [(129, 140)])
    assert rows_of(index)["a", ends[1].tobytes()][0]
