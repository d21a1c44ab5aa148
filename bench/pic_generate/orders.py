"""Where things stand in a list, and orders that change from call to call."""

from __future__ import annotations

import random
from collections.abc import Iterator
from enum import Enum
from math import factorial


class Place(Enum):
    """Where in a list something changes."""

    START = "start"
    MIDDLE = "middle"
    END = "end"

    def first(self, num_all: int, num_here: int) -> int:
        """The index of the first of `num_here` neighbours that stand here in a list of `num_all`."""
        return {Place.START: 0, Place.MIDDLE: (num_all - num_here) // 2, Place.END: num_all - num_here}[self]


def draw_orders(rng: random.Random, count: int) -> Iterator[tuple[int, ...]]:
    """Yield shuffled orders of `count` places (2 or more), without end.

    None comes again before all have come, and none twice in a row.
    """
    last: tuple[int, ...] = ()
    while True:
        used: set[tuple[int, ...]] = set()
        while len(used) < factorial(count):
            order = tuple(rng.sample(range(count), count))
            if order != last and order not in used:
                used.add(order)
                last = order
                yield order
