"""Where two texts are the same again after they differed, by token ids.

At most `MAX_SEARCH` tokens of each text are compared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pic_traces.encode.encoded import Tokens

from sglang_pic.census.windows import window_hashes
from sglang_pic.core import common_len

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


def _first_window(old: Tokens, new: Tokens) -> Alignment | None:
    if len(old) < WINDOW or len(new) < WINDOW:
        return None
    names, first = np.unique(window_hashes(old, WINDOW), return_index=True)
    wanted = window_hashes(new, WINDOW)
    at = np.searchsorted(names, wanted).clip(max=len(names) - 1)
    hits = np.flatnonzero(names[at] == wanted)
    if len(hits) == 0:
        return None
    # `argmin` keeps the first of equals, so the answer depends on nothing but the tokens.
    best = hits[np.argmin(hits + first[at[hits]])]
    new_len, old_len = int(best), int(first[at[best]])
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
