"""Which rows of a path are published as computed, spliced or approximate, and with how many changed fields before them.

The server and the census publish by these rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_pic.core.exactness import Exactness
from sglang_pic.core.spans import Span, intersect_spans


class Published(NamedTuple):
    """The origin of a path's rows in the radix tree, by position.

    Positions that are neither computed nor spliced keep what was known of them; unknown ones are not donors.
    """

    computed: Sequence[Span] = ()
    """The request computed these rows at their positions. Their chunks become donors."""
    spliced: Sequence[Span] = ()
    """These rows came from a splice: they are not donors from now on, also where `computed` has them too."""
    approximate: Sequence[Span] = ()
    """These rows are spliced, or were computed behind spliced rows, wherever those are. May leave `spliced` out."""
    generations: Sequence[tuple[int, int]] = ()
    """`(position, number)`: the rows from this position on depend on rows with so many changed fields before them."""


def rows_of_request(
    path_len: int,
    adopted_from: int,
    *,
    matched_len: int,
    prefix: Exactness,
    spliced: Sequence[Span],
    generations: Sequence[tuple[int, int]],
    adopted_again: Sequence[Span] = (),
) -> Published | None:
    """What a request publishes of its row when the radix tree has taken it over.

    Only rows that the tree adopted count. Where another request's rows were there first, ours were freed as duplicates.

    Args:
        path_len: tokens of the row.
        adopted_from: the tree has had the rows before this position.
        matched_len: the request's exact prefix match; it neither computed nor spliced these rows.
        prefix: what is known of the rows of that match.
        spliced: spans of the row that hold spliced rows, ascending.
        generations: where each of them begins, and how many changed fields its rows have before them.
        adopted_again: spans before `adopted_from` of which the tree had rows on the host only, and took ours for the
            device. Both copies may be read: our spliced rows are not donors, our computed ones stay what they were.

    Returns:
        The rows; None where the tree adopted none.
    """
    start = max(adopted_from, matched_len)
    computed = [(start, path_len)] if start < path_len else []
    adopted = [span for span in adopted_again if span[1] > matched_len] + computed
    if not adopted:
        return None
    # NOTE: a row that was computed behind spliced ones is approximate, although the tree may have another request's
    # computed rows in their place.
    behind = prefix.approximate(spliced, path_len)
    # Before `first` the tree may have cleaner rows of another request: ours were computed behind our own.
    first = max(matched_len, adopted[0][0])
    return Published(
        computed,
        spliced=[part for span in adopted for part in intersect_spans(spliced, *span)],
        approximate=[part for span in adopted for part in intersect_spans(behind, *span)],
        generations=[(max(position, first), number) for position, number in generations],
    )


def rows_from_store(start: int, end: int, exact_end: int, max_generation: int) -> Published:
    """What is published of the rows `[start, end)` of a path that came from a store.

    Other servers computed those before `exact_end`, at their positions. The rest is spliced, or behind spliced rows, or
    its server had forgotten which: approximate rows that are not donors, with `max_generation` changed fields.
    """
    first = max(start, min(exact_end, end))
    behind = [(first, end)] if first < end else []
    return Published(
        [(start, first)] if start < first else [],
        approximate=behind,
        generations=[(begin, max_generation) for begin, _ in behind],
    )
