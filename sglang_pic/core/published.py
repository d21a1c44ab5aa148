"""The rules by which server and census publish rows as computed, spliced or approximate, and with which generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_pic.core.exactness import Exactness
from sglang_pic.core.spans import Span, intersect_spans


class Published(NamedTuple):
    """The origin of a path's rows in the radix tree, by position.

    Other positions stay as they were marked before; unmarked ones are not donors.
    """

    computed: Sequence[Span] = ()
    """Rows that the request computed at their positions. Their chunks become donors."""
    spliced: Sequence[Span] = ()
    """Spliced rows. They are not donors, also where `computed` has them too."""
    approximate: Sequence[Span] = ()
    """Spliced rows, and rows computed after spliced ones. May leave out those of `spliced`."""
    generations: Sequence[tuple[int, int]] = ()
    """`(position, number)`: the rows from this position on depend on so many changed fields."""


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
    """The rows that a request publishes after the radix tree has inserted it.

    Only rows that the tree adopted count; duplicates of rows that it already had were freed.

    Args:
        path_len: tokens of the request.
        adopted_from: first position whose row the tree adopted.
        matched_len: length of the request's exact prefix match, whose rows it neither computed nor spliced.
        prefix: exactness of the rows of that match.
        spliced: the request's spliced spans, ascending.
        generations: start and generation of each of them.
        adopted_again: spans before `adopted_from` that the tree had on the host only and adopted for the device. Both
            copies may be read: spliced rows are not donors, computed rows stay as they were marked.

    Returns:
        The rows; None where the tree adopted none.
    """
    start = max(adopted_from, matched_len)
    computed = [(start, path_len)] if start < path_len else []
    adopted = [span for span in adopted_again if span[1] > matched_len] + computed
    if not adopted:
        return None
    # NOTE: a row computed after spliced ones is approximate, although the tree may have another request's computed rows
    # at their positions.
    behind = prefix.approximate(spliced, path_len)
    # Before `first` the tree may have cleaner rows of another request; ours depend on our own.
    first = max(matched_len, adopted[0][0])
    return Published(
        computed,
        spliced=[part for span in adopted for part in intersect_spans(spliced, *span)],
        approximate=[part for span in adopted for part in intersect_spans(behind, *span)],
        generations=[(max(position, first), number) for position, number in generations],
    )


def rows_from_store(start: int, end: int, exact_end: int, max_generation: int, *, on_device: int = 0) -> Published:
    """The rows to publish of `[start, end)` of a path that was loaded from a store.

    Rows before `exact_end` were computed by other servers at their positions. The others are published as spliced, with
    generation `max_generation`.

    The first `on_device` rows of the path are on the device, too. Both copies may be read: rows of the store that are
    approximate are no donors, and with exact ones those of the device stay as they were marked.
    """
    first = max(start, min(exact_end, end))
    fresh, behind = max(start, on_device), [(first, end)] if first < end else []
    return Published(
        [(fresh, first)] if fresh < first else [],
        spliced=behind,
        generations=[(begin, max_generation) for begin, _ in behind],
    )
