"""The upper bound of the census: repeated text that a search at every alignment finds.

A token counts if it lies in a window of `WINDOW_LEN` tokens that an earlier call also had, at any position. Windows are
compared by 64-bit hashes. Two different windows have the same hash with a chance of about 2^-64, and no answer depends
on these counts.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from pic_traces.encode.encoded import Tokens

WINDOW_LEN = 64

Hashes: TypeAlias = npt.NDArray[np.uint64]

_FACTOR = 0x9E3779B97F4A7C15


class Repeated(NamedTuple):
    """Prompt tokens outside the prefix that lie in a window seen before."""

    num: int
    """Tokens in any such window; the window may begin in the prefix."""
    num_behind: int
    """Tokens in such a window that lies entirely after the prefix."""


class WindowSearch:
    """The windows of all calls so far. Memory: 8 bytes for each distinct window, at most four times that in a merge.

    Args:
        window_len: tokens of a window.
    """

    def __init__(self, window_len: int = WINDOW_LEN) -> None:
        self._window_len = window_len
        # Ascending, distinct, disjoint; each at least twice as long as the next, so that there are few of them.
        self._seen: list[Hashes] = []

    def observe(self, path: Tokens, *, prompt_len: int, prefix_len: int) -> Repeated:
        """Count the tokens of `path[prefix_len:prompt_len]` that lie in a window seen before; then remember the path.

        Args:
            path: prompt and answer.
            prompt_len: windows of the prompt are looked up, those of the answer are only remembered.
            prefix_len: `path[:prefix_len]` begins an earlier path, so its windows are known. Windows that reach over
                its end are looked up.
        """
        size = self._window_len
        first = max(0, prefix_len - size + 1)
        # Sorted, because ascending queries walk through the long arrays instead of jumping about in them.
        names, places = np.unique(window_hashes(path[first:], size), return_inverse=True)
        known = np.zeros(len(names), dtype=np.bool_)
        for seen in self._seen:
            at = np.minimum(np.searchsorted(seen, names), len(seen) - 1)
            known |= seen[at] == names
        self._remember(names[~known])
        is_known = known[places]
        starts = np.flatnonzero(is_known[: max(0, prompt_len - size + 1 - first)]) + first
        behind = starts[np.searchsorted(starts, prefix_len) :]
        return Repeated(_union_len(starts, prefix_len, size), _union_len(behind, prefix_len, size))

    def _remember(self, fresh: Hashes) -> None:
        if not len(fresh):
            return
        while self._seen and len(self._seen[-1]) < 2 * len(fresh):
            fresh = np.concatenate([self._seen.pop(), fresh])
            fresh.sort()
        self._seen.append(fresh)


def window_hashes(tokens: Tokens, window_len: int) -> Hashes:
    """One hash for the window at every alignment, `sum(mixed(token) * FACTOR^k)`; empty where no window fits."""
    # Token ids are small numbers; mixed over 64 bits (as splitmix64 does), their sums do not meet.
    hashes = tokens.astype(np.uint64) + np.uint64(_FACTOR)
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes ^= hashes >> np.uint64(31)
    size = 1
    while size < window_len:
        # The hash of a window is put together from two halves. They may overlap: equal windows still get equal hashes.
        step = min(size, window_len - size)
        hashes = hashes[:-step] * np.uint64(pow(_FACTOR, step, 1 << 64)) + hashes[step:]
        size += step
    return hashes


def _union_len(starts: npt.NDArray[np.int64], floor: int, size: int) -> int:
    """Tokens from `floor` on in the windows that begin at `starts` (ascending)."""
    if not len(starts):
        return 0
    ends = starts + size
    # Each window adds the tokens that the window before it lacks.
    reached = np.maximum(np.concatenate([[floor], ends[:-1]]), floor)
    return int(np.maximum(ends - np.maximum(starts, reached), 0).sum())
