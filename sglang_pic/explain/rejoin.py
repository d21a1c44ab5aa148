"""Where two texts are the same again after they differed, by token ids.

At most `MAX_SEARCH` tokens of each text are compared.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from pic_traces.encode.encoded import Tokens

from sglang_pic.census.windows import window_hashes
from sglang_pic.core import common_len, common_suffix_len

WINDOW = 16
"""Equal tokens that show that two texts are the same again; any two texts of one template have fewer by chance."""
MAX_SEARCH = 32_768
# Near the prompt's end there may be no whole window after a changed field. Then fewer equal tokens are enough, if both
# texts are equal up to the prompt's end.
_TAIL_SEARCH = 48
_TAIL_WINDOW = 3


class Alignment(NamedTuple):
    """Old `[0, old_len)` became new `[0, new_len)`; the next `same_len` tokens are equal, or more."""

    old_len: int
    new_len: int
    same_len: int


def align(old: Tokens, new: Tokens) -> Alignment | None:
    """The first place where both texts are equal again: the one that skips the fewest tokens of both together.

    Args:
        old: the rest of the earlier text.
        new: the rest of the prompt.

    Returns:
        The lengths, or None if the texts are never equal again.
    """
    old, new = old[:MAX_SEARCH], new[:MAX_SEARCH]
    return _first_window(old, new) or _same_tail(old, new)


def contained_share(part: Tokens, whole: Tokens, window: int = WINDOW) -> float:
    """The share of the tokens of `part` in windows that `whole` has anywhere; 0 if either is too short."""
    part, whole = part[:MAX_SEARCH], whole[:MAX_SEARCH]
    if len(part) < window or len(whole) < window:
        return 0.0
    found = np.isin(window_hashes(part, window), window_hashes(whole, window))
    # A token is covered by the windows that begin at it and at the `window - 1` before it.
    return float((np.convolve(found, np.ones(window, np.int64)) > 0).mean())


def moved_share(old: Tokens, new: Tokens) -> float:
    """The share of `new` that `old` has in another order, by the windows that each of them has once."""
    old, new = old[:MAX_SEARCH], new[:MAX_SEARCH]
    if len(old) < WINDOW or len(new) < WINDOW:
        return 0.0
    single = []
    for text in (old, new):
        names, starts, counts = np.unique(window_hashes(text, WINDOW), return_index=True, return_counts=True)
        single.append((names[counts == 1], starts[counts == 1]))
    _, olds, news = np.intersect1d(single[0][0], single[1][0], assume_unique=True, return_indices=True)
    in_order: list[int] = []
    # `in_order[n]` is the least last place of an ascending sequence of n + 1 places.
    for place in single[0][1][olds][np.argsort(single[1][1][news])].tolist():
        at = bisect_left(in_order, place)
        in_order[at : at + 1] = [place]
    return (len(olds) - len(in_order)) / len(new)


def _first_window(old: Tokens, new: Tokens) -> Alignment | None:
    """The first anchor: a window that each text has once, or any window that both have if there is none.

    What recurs within a text (the frame of tools, of objects, of messages) is the same at many places.
    """
    if len(old) < WINDOW or len(new) < WINDOW:
        return None
    of_old, of_new = (
        np.unique(window_hashes(text, WINDOW), return_index=True, return_counts=True) for text in (old, new)
    )
    _, olds, news = np.intersect1d(of_old[0], of_new[0], assume_unique=True, return_indices=True)
    is_single = np.maximum(of_old[2][olds], of_new[2][news]) == 1
    if is_single.any():
        olds, news = olds[is_single], news[is_single]
    starts = of_old[1][olds], of_new[1][news]
    if len(olds) == 0:
        return None
    # Of equal sums the first place in the prompt, so the answer depends on nothing but the tokens.
    best = np.lexsort((starts[1], starts[0] + starts[1]))[0]
    old_len, new_len = int(starts[0][best]), int(starts[1][best])
    back = common_suffix_len(old[:old_len], new[:new_len])
    old_len, new_len = old_len - back, new_len - back
    same_len = common_len(old[old_len:], new[new_len:])
    # Unequal windows with equal hashes count for nothing.
    return Alignment(old_len, new_len, same_len) if same_len >= WINDOW else None


def _same_tail(old: Tokens, new: Tokens) -> Alignment | None:
    if len(new) > _TAIL_SEARCH + WINDOW:
        return None
    best: Alignment | None = None
    for new_len in range(len(new) - _TAIL_WINDOW + 1):
        tail = new[new_len:]
        for old_len in range(min(len(old) - len(tail), _TAIL_SEARCH) + 1):
            closer = best is None or old_len + new_len < best.old_len + best.new_len
            if closer and old[old_len] == tail[0] and np.array_equal(old[old_len : old_len + len(tail)], tail):
                best = Alignment(old_len, new_len, len(tail))
    return best
