"""The inner loops of plans over token ids, compiled by `native.py`: comparisons, and the scan for endings of chunks.

NOTE: what a loop calls or reads is defined in its own file, because numba's cache is renewed when that file changes.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sglang_pic.core.native import loop

Bytes: TypeAlias = npt.NDArray[np.uint8]
Hashes: TypeAlias = npt.NDArray[np.uint32]
Ints: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]

# --- How far two arrays agree ---

# So many tokens are compared in one step.
_STEP = 16


@loop("titii")
def equal_from(left: Ints, left_at: int, right: Ints, right_at: int, limit: int) -> int:
    """How many tokens from the two places on are equal, at most `limit`."""
    one, other = left[left_at : left_at + limit], right[right_at : right_at + limit]
    at = 0
    while at + _STEP <= limit:
        differing = 0
        for i in range(at, at + _STEP):
            differing |= one[i] ^ other[i]
        if differing:
            break
        at += _STEP
    while at < limit and one[at] == other[at]:
        at += 1
    return at


@loop("titii")
def equal_before(left: Ints, left_end: int, right: Ints, right_end: int, limit: int) -> int:
    """How many tokens directly before the two places are equal, at most `limit`."""
    one, other = left[left_end - limit : left_end], right[right_end - limit : right_end]
    at = limit
    while at >= _STEP:
        differing = 0
        for i in range(at - _STEP, at):
            differing |= one[i] ^ other[i]
        if differing:
            break
        at -= _STEP
    while at > 0 and one[at - 1] == other[at - 1]:
        at -= 1
    return limit - at


@loop("titiii")
def equal_around(left: Ints, left_at: int, right: Ints, right_at: int, before: int, after: int) -> tuple[int, int]:
    """`equal_before` of at most `before` tokens, and `equal_from` of at most `after`."""
    return equal_before(left, left_at, right, right_at, before), equal_from(left, left_at, right, right_at, after)


@loop("ttqi")
def find_flank(old: Ints, new: Ints, probes: Longs, flank_len: int) -> tuple[int, int]:
    """Find the `flank_len` tokens that end `probe` tokens before the end of `old` in `new`, for the first such probe.

    Returns:
        The probe, and the last place of the tokens in `new`; (0, -1) if no probe has any.
    """
    for probe in probes:
        skipped = int(probe)
        start = len(old) - skipped - flank_len
        if start < 0:
            break
        flank = old[start : start + flank_len]
        for at in range(len(new) - flank_len, -1, -1):
            if new[at] == flank[0] and equal_from(new, at, flank, 0, flank_len) == flank_len:
                return skipped, at
    return 0, -1


@loop("ttii")
def equal_parts(old: Ints, new: Ints, least: int, most_pairs: int) -> tuple[int, Ints]:
    """The longest part that both sides have, at least `least` tokens, and those before and after it, and so on; the
    first of equally long ones, as `difflib` finds them.

    Returns:
        The number of pairs of equal tokens, and for each part its start in `old`, in `new` and its length, in no order;
        none with more than `most_pairs`.
    """
    # Pairs of equal tokens, and how many tokens up to there are equal; the same of the last row of pairs.
    pairs, lengths = np.empty((most_pairs, 3), np.int32), np.zeros((2, len(new) + 1), np.int32)
    parts, num_pairs, num_parts = np.empty(3 * (most_pairs + 1), np.int32), 0, 0
    for i in range(len(old)):
        row, last = lengths[i & 1], lengths[~i & 1]
        for j in range(len(new)):
            row[j + 1] = last[j] + 1 if old[i] == new[j] else 0
            if row[j + 1]:
                if num_pairs == most_pairs:
                    return num_pairs + 1, parts[:0]
                pairs[num_pairs, 0], pairs[num_pairs, 1], pairs[num_pairs, 2] = i, j, row[j + 1]
                num_pairs += 1
    left = [(0, len(old), 0, len(new))]
    while left:
        old_start, old_end, new_start, new_end = left.pop()
        longest = old_at = new_at = 0
        for k in range(num_pairs):
            i, j = int(pairs[k, 0]), int(pairs[k, 1])
            if old_start <= i < old_end and new_start <= j < new_end:
                length = min(int(pairs[k, 2]), i + 1 - old_start, j + 1 - new_start)
                if length > longest:
                    longest, old_at, new_at = length, i + 1 - length, j + 1 - length
        if longest >= least:
            parts[num_parts], parts[num_parts + 1], parts[num_parts + 2] = old_at, new_at, longest
            num_parts += 3
            left.append((old_start, old_at, new_start, new_at))
            left.append((old_at + longest, old_end, new_at + longest, new_end))
    return num_pairs, parts[:num_parts]


# --- Endings of chunks ---

ENDING_LEN = 8
"""Tokens of an ending; shorter chunks are not looked up."""

# So many hashes at a time fit into the nearest cache.
_BLOCK = 1024
# The five primes of xxHash32: odd, so that multiplication loses nothing, with bits well spread.
_TOKEN, _STEP_1, _STEP_2, _STEP_4, _FINAL = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1
_32_BITS = 0xFFFFFFFF


@loop()
def _double(before: Hashes, length: int, prime: int, after: Hashes, num: int) -> None:
    """The first `num` hashes of twice `length` tokens from those of `length`."""
    for i in range(num):
        after[i] = (int(before[i]) * prime + int(before[i + length])) & _32_BITS


@loop("t")
def hash_endings(tokens: Ints) -> Hashes:
    """Hash `i` is that of `tokens[i : i + ENDING_LEN]`: `[max(0, len - ENDING_LEN + 1)]`. About .2 ns a token."""
    hashes = np.empty(max(0, len(tokens) - ENDING_LEN + 1), np.uint32)
    one, two, four = np.empty(_BLOCK + 7, np.uint32), np.empty(_BLOCK + 6, np.uint32), np.empty(_BLOCK + 4, np.uint32)
    for start in range(0, len(hashes), _BLOCK):
        block = hashes[start : start + _BLOCK]
        taken = tokens[start : start + len(block) + ENDING_LEN - 1]
        for i in range(len(taken)):
            mixed = (int(taken[i]) * _TOKEN) & _32_BITS
            one[i] = mixed ^ (mixed >> 15)
        _double(one, 1, _STEP_1, two, len(block) + 6)
        _double(two, 2, _STEP_2, four, len(block) + 4)
        _double(four, 4, _STEP_4, block, len(block))
        for i in range(len(block)):
            mixed = (int(block[i]) * _FINAL) & _32_BITS
            block[i] = mixed ^ (mixed >> 16)
    return hashes


@loop("ubi")
def find_set(hashes: Hashes, slots: Bytes, shift: int) -> Longs:
    """The indices of the hashes whose bit is set in the slots of a filter, ascending. About 2 ns a hash."""
    places = np.empty(len(hashes), np.int64)
    count = 0
    for i in range(len(hashes)):
        places[count] = i
        count += int(slots[hashes[i] >> shift] >> (hashes[i] & 7)) & 1
    return places[:count]
