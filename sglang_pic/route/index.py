"""Which servers hold which chunks, as far as they told: names to sets of servers, in flat arrays.

A hash table in two arrays gives each name the number of a set of servers; every set is kept once, as the bits of an
integer. Text that went the same way has the same set, so there are few.

    names   [slots] uint64: 0 where a slot is free
    sets    [slots] uint32: 0 where no server holds the name any more
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from sglang_pic.core import ReusePolicy
from sglang_pic.route.sketch import Names, Sketched

Server = Hashable
"""What names a server: a number or its address."""

MAX_NAMES_PER_SERVER: Final = 1 << 20
"""Most names kept of one server; ten times what a server's chunk index tells by default."""

_MIN_BITS = 10
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_NOBODY = 0
# Share of the equal text behind a prompt's first difference that a server is thought to compute all the same: what may
# have drawn on a changed field, and rows with too many changes behind them. Names do not tell which. Swept in
# simulations of 8 servers on OpenDevin and the generator `tool_aging`.
_COMPUTED_ANYWAY = 0.5
# sys.getsizeof of an integer of a few words, its places in a list and a dictionary, and a counter.
_SET_BYTES = 220


class FleetIndex:
    """Names and their servers. Shrinks with `remove` and `forget`. Not thread-safe.

    Args:
        policy: what servers splice.
        max_names_per_server: what a server tells beyond that is passed over.
    """

    def __init__(self, policy: ReusePolicy | None = None, *, max_names_per_server: int = MAX_NAMES_PER_SERVER) -> None:
        self._policy = policy or ReusePolicy()
        self._max_names = max_names_per_server
        # The bit of every server that has told a name, and how many names it holds; `forget` frees it.
        self._bits: dict[Server, int] = {}
        self._num_held: dict[Server, int] = {}
        # Set 0 is the empty one. A set that no name has is dropped.
        self._masks: list[int] = [0]
        self._numbers: dict[int, int] = {0: _NOBODY}
        self._counts: list[int] = [0]
        self._free: list[int] = []
        self._num_used = 0
        self._reset(_MIN_BITS)

    def __len__(self) -> int:
        """Names that a server holds."""
        return self._num_used - self._counts[_NOBODY]

    @property
    def num_bytes(self) -> int:
        """Host memory of all that is kept."""
        servers = 400 * len(self._bits)
        wide = len(self._bits) // 8 * len(self._numbers)
        return self._names.nbytes + self._sets.nbytes + _SET_BYTES * len(self._numbers) + wide + servers

    def num_names(self, server: Server) -> int:
        """Names that a server holds."""
        return self._num_held.get(server, 0)

    def missing(self, server: Server, names: Names) -> Names:
        """Those of some names that a server is not known to hold. Cost O(names)."""
        bit = self._bits.get(server)
        if bit is None:
            return names
        slots = self._find(names)
        return names[(slots < 0) | ~self._has_bit(self._sets[slots], bit)]

    def add(self, server: Server, names: Sequence[int] | Names) -> None:
        """Note that a server holds chunks. Cost O(names)."""
        bit = self._bits.get(server)
        if bit is None:
            taken = set(self._bits.values())
            bit = self._bits[server] = next(each for each in range(len(taken) + 1) if each not in taken)
            self._num_held[server] = 0
        told = _distinct(names)
        slots = self._find(told)
        known = self._sets[slots[slots >= 0]]
        is_new = np.ones(len(told), dtype=np.bool_)
        is_new[slots >= 0] = ~self._has_bit(known, bit)
        told = told[is_new][: self._max_names - self._num_held[server]]
        self._make_room(len(told))
        self._move(self._insert(told), lambda mask: mask | 1 << bit)
        self._num_held[server] += len(told)

    def remove(self, server: Server, names: Sequence[int] | Names) -> None:
        """Note that a server holds chunks no longer; those it never told do not matter. Cost O(names)."""
        bit = self._bits.get(server)
        if bit is None:
            return
        slots = self._find(_distinct(names))
        slots = slots[slots >= 0]
        slots = slots[self._has_bit(self._sets[slots], bit)]
        self._move(slots, lambda mask: mask & ~(1 << bit))
        self._num_held[server] -= len(slots)
        self._shrink()

    def forget(self, server: Server) -> None:
        """A server holds nothing: it was flushed, restarted or is gone. Cost O(all names)."""
        bit = self._bits.pop(server, None)
        if bit is None:
            return
        del self._num_held[server]
        self._move(np.flatnonzero(self._has_bit(self._sets, bit)), lambda mask: mask & ~(1 << bit))
        self._shrink()

    def held(self, sketched: Sketched) -> dict[Server, int]:
        """Estimate how many tokens of a prompt each server would not compute, without those that hold nothing.

        As on a server, an equal span from the first token on serves whole; another one without its seam and the
        prompt's tail, and only where it and what is left are long enough. Of what is left a part is computed anyway.
        """
        slots = self._find(sketched.names)
        sets = np.where(slots >= 0, self._sets[slots], _NOBODY)
        if not sets.any():
            return {}
        # Neighbours with one set are one segment.
        lasts = np.flatnonzero(np.append(sets[1:] != sets[:-1], True))
        bounds = np.concatenate([[0], sketched.ends[lasts]])
        members = self._members(sets[lasts])
        tokens = self._served(members, bounds)
        return {server: int(tokens[bit]) for server, bit in self._bits.items() if tokens[bit]}

    def _served(self, members: npt.NDArray[np.uint8], bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens that each server serves of segments `[bounds[i], bounds[i + 1])`, of which it holds those marked.

        Args:
            members: `[num_segments, num_servers]`.
        """
        policy = self._policy
        padded = np.zeros((members.shape[1], members.shape[0] + 2), dtype=np.int8)
        padded[:, 1:-1] = members.T
        steps = np.diff(padded)
        servers, first = np.nonzero(steps == 1)
        starts, ends = bounds[first], bounds[np.nonzero(steps == -1)[1]]
        lengths = ends - starts
        spliced = np.minimum(ends, bounds[-1] - policy.tail_tokens) - starts - policy.seam_tokens
        is_long = (lengths >= policy.min_run_tokens) & (spliced >= policy.min_spliced_tokens)
        served = np.where(starts == 0, lengths, np.where(is_long, (1 - _COMPUTED_ANYWAY) * spliced, 0))
        return np.bincount(servers, weights=served, minlength=members.shape[1]).astype(np.int64)

    def _members(self, sets: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
        """The servers of sets, as bits: `[num_sets, num_bits]`."""
        num_bytes = max(self._bits.values(), default=0) // 8 + 1
        distinct, places = np.unique(sets, return_inverse=True)
        raw = b"".join([self._masks[each].to_bytes(num_bytes, "little") for each in distinct.tolist()])
        packed = np.frombuffer(raw, dtype=np.uint8).reshape(len(distinct), num_bytes)
        return np.unpackbits(packed, axis=1, bitorder="little")[places]

    def _has_bit(self, sets: npt.NDArray[np.uint32], bit: int) -> npt.NDArray[np.bool_]:
        has = np.fromiter((mask >> bit & 1 for mask in self._masks), dtype=np.bool_, count=len(self._masks))
        return has[sets]

    def _find(self, names: Names) -> npt.NDArray[np.int64]:
        """The slot of each name, -1 where it has none."""
        found = np.full(len(names), -1, dtype=np.int64)
        wanted = _not_zero(names)
        slots = self._home(wanted)
        left = np.arange(len(names))
        while len(left):
            there = self._names[slots]
            is_found = there == wanted
            found[left[is_found]] = slots[is_found]
            goes_on = (there != 0) & ~is_found
            left, wanted, slots = left[goes_on], wanted[goes_on], (slots[goes_on] + 1) & self._last
        return found

    def _insert(self, names: Names) -> npt.NDArray[np.int64]:
        """The slot of each of distinct names, which get one where they have none; there is to be room."""
        placed = np.zeros(len(names), dtype=np.int64)
        wanted = _not_zero(names)
        slots = self._home(wanted)
        left = np.arange(len(names))
        while len(left):
            is_free = self._names[slots] == 0
            # Of several that want a free slot the last one gets it.
            self._names[slots[is_free]] = wanted[is_free]
            is_placed = self._names[slots] == wanted
            num_new = int(np.count_nonzero(is_free & is_placed))
            self._num_used += num_new
            self._counts[_NOBODY] += num_new
            placed[left[is_placed]] = slots[is_placed]
            left, wanted = left[~is_placed], wanted[~is_placed]
            slots = (slots[~is_placed] + 1) & self._last
        return placed

    def _home(self, names: Names) -> npt.NDArray[np.int64]:
        return ((names * _SPREAD) >> np.uint64(64 - self._num_bits)).astype(np.int64)

    def _move(self, slots: npt.NDArray[np.int64], change: Callable[[int], int]) -> None:
        """Give the names in slots other sets."""
        distinct, places, counts = np.unique(self._sets[slots], return_inverse=True, return_counts=True)
        changed = np.empty(len(distinct), dtype=np.uint32)
        for at, (number, count) in enumerate(zip(distinct.tolist(), counts.tolist(), strict=True)):
            changed[at] = self._take(change(self._masks[number]), count)
        for number, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            self._drop(number, count)
        self._sets[slots] = changed[places]

    def _take(self, mask: int, count: int) -> int:
        number = self._numbers.get(mask)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._masks[number] = mask
            else:
                number = len(self._masks)
                self._masks.append(mask)
                self._counts.append(0)
            self._numbers[mask] = number
        self._counts[number] += count
        return number

    def _drop(self, number: int, count: int) -> None:
        self._counts[number] -= count
        if not self._counts[number] and number != _NOBODY:
            del self._numbers[self._masks[number]]
            self._masks[number] = 0
            self._free.append(number)

    def _make_room(self, num_names: int) -> None:
        # At most 5 of 8 slots are used: a look-up reads two or three.
        if 8 * (self._num_used + num_names) > 5 * len(self._names):
            self._rebuild(len(self) + num_names)

    def _shrink(self) -> None:
        if len(self._names) > 1 << _MIN_BITS and 8 * len(self) < len(self._names):
            self._rebuild(len(self))

    def _rebuild(self, num_names: int) -> None:
        """Lay out anew what servers hold, with room for `num_names` and half as many again."""
        is_live = self._sets != _NOBODY
        names, sets = self._names[is_live], self._sets[is_live]
        self._reset(max(_MIN_BITS, (12 * num_names // 5).bit_length()))
        self._num_used, self._counts[_NOBODY] = 0, 0
        self._sets[self._insert(names)] = sets
        self._counts[_NOBODY] = 0

    def _reset(self, num_bits: int) -> None:
        self._num_bits, self._last = num_bits, (1 << num_bits) - 1
        self._names = np.zeros(1 << num_bits, dtype=np.uint64)
        self._sets = np.zeros(1 << num_bits, dtype=np.uint32)


def _distinct(names: Sequence[int] | Names) -> Names:
    return np.unique(np.asarray(names, dtype=np.uint64))


def _not_zero(names: Names) -> Names:
    """0 marks a free slot."""
    return np.maximum(names, np.uint64(1))
