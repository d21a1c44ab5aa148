"""What the planner asks about the rows of donors: it has none itself."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_pic.core.path import Path
from sglang_pic.core.spans import Span


class RowSource:
    """The rows of donors' paths, for the plans of one request; this one has the rows of every path on the device.

    Tiers and pools of rows answer here: host memory, a pool for sliding windows, pins.
    """

    def num_resident(self, path: Path, end: int) -> int:
        """How many leading tokens of a path, at most to the end of `end`'s page, have rows.

        Asked of every run before it is chosen; where the rows end before the run does, another donor is tried. What is
        found must stay until the plan ends, and the index must not be called.
        """
        return end

    def holes(self, path: Path, start: int, end: int) -> Sequence[Span]:
        """The parts of a span, resident up to its end, of which some layers have no rows; ascending."""
        return ()

    def num_to_fetch(self, path: Path, start: int, end: int) -> int:
        """How many rows of a span, resident up to its end, are on the host."""
        return 0

    def pinned_len(self, path: Path) -> int:
        """How many leading tokens of a path are pinned: to their rows the context rule does not apply."""
        return 0

    def pinned_end(self, path: Path, shift: int) -> int:
        """The position in the prompt up to which a donor's rows are pinned; 0 if none are."""
        pinned_len = self.pinned_len(path)
        return pinned_len + shift if pinned_len else 0
