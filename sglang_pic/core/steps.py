"""Steps of positions: within one of them, rows depend on the distances between tokens alone.

A model may scale its attention by steps, or cut it there: a token of Llama-4 attends to its own chunk of 8,192 tokens.
Rows that were cut from other text than they are at their new place are far off: a tiny model with chunks of 64 was .02
nats off when text moved by 256 tokens, .24 by 263 and .42 by 288, and .5 when its keys were not turned.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_pic.core.spans import Span


class PositionSteps(NamedTuple):
    """`length` positions in a row that a model treats alike.

    Position `p` is in step `(p + offset) // length`.
    """

    length: int
    offset: int = 0

    @property
    def first_len(self) -> int:
        """Positions of the first step."""
        return self.length - self.offset

    def crossed(self, start: int, end: int, shift: int) -> list[Span]:
        """The parts of `[start, end)`, ascending, whose positions are in another step `shift` positions on."""
        width = abs(shift)
        if width >= self.length:
            return [(start, end)]
        parts = []
        # A position crosses within `width` in front of a step's begin, or behind it on the way back.
        before = width if shift > 0 else 0
        begin = (start + self.offset) // self.length * self.length - self.offset
        while begin - before < end:
            part = max(start, begin - before), min(end, begin - before + width)
            if part[0] < part[1]:
                parts.append(part)
            begin += self.length
        return parts
