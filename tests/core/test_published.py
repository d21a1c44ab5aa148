"""What of a path is published as computed, spliced, approximate or aged, and what is left out."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_pic.core import Exactness
from sglang_pic.core.published import Published, rows_from_store, rows_of_request

# [0, 10) matched, [10, 30) computed, [30, 60) spliced behind one changed field, [60, 80) computed.
REQUEST: dict[str, Any] = {
    "matched_len": 10,
    "prefix": Exactness(exact_len=10),
    "spliced": [(30, 60)],
    "generations": [(30, 1)],
}


@pytest.mark.parametrize(
    ("adopted_from", "again", "published"),
    [
        (10, [], Published([(10, 80)], [(30, 60)], [(30, 80)], [(30, 1)])),
        (40, [], Published([(40, 80)], [(40, 60)], [(40, 80)], [(40, 1)])),
        (70, [], Published([(70, 80)], [], [(70, 80)], [(70, 1)])),
        (80, [], None),
        (80, [(0, 10)], None),
        (80, [(50, 70)], Published([], [(50, 60)], [(50, 70)], [(50, 1)])),
        (70, [(20, 40)], Published([(70, 80)], [(30, 40)], [(30, 40), (70, 80)], [(30, 1)])),
    ],
)
def test_a_request_publishes_what_the_tree_adopted(
    adopted_from: int, again: list[tuple[int, int]], published: Published | None
) -> None:
    assert rows_of_request(80, adopted_from, **REQUEST, adopted_again=again) == published


def test_what_is_computed_behind_an_approximate_prefix_is_approximate() -> None:
    request = REQUEST | {"prefix": Exactness(4, 2, 4), "spliced": [], "generations": []}
    assert rows_of_request(80, 0, **request) == Published([(10, 80)], [], [(10, 80)], [])


@pytest.mark.parametrize(
    ("exact_end", "published"),
    [
        (5, Published([], approximate=[(10, 40)], generations=[(10, 2)])),
        (25, Published([(10, 25)], approximate=[(25, 40)], generations=[(25, 2)])),
        (90, Published([(10, 40)], approximate=[], generations=[])),
    ],
)
def test_rows_of_a_store_are_donors_as_far_as_they_are_exact(exact_end: int, published: Published) -> None:
    assert rows_from_store(10, 40, exact_end, 2) == published
