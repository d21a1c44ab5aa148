"""What the planner asks about rows, as it has none itself: where a donor's are, and which of them can be moved."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_pic.core.path import Path
from sglang_pic.core.spans import Span
from sglang_pic.core.steps import PositionSteps


class RowSource:
    """The rows of donors' paths, for the plans of one request; this one has the rows of every path on the device.

    Whatever has rows answers here: the device, host memory, a pool for sliding windows, pins, images. Rows of drafts
    and index keys lie in the slots of the target's rows and move with them, so nothing is asked about them.

    Args:
        steps: by which the model scales or cuts its attention; no row is moved to another step.
        whole: spans of the prompt, ascending and disjoint, that a run contains completely or not at all: images.
    """

    def __init__(self, *, steps: Sequence[PositionSteps] = (), whole: Sequence[Span] = ()) -> None:
        self._steps, self.whole = steps, whole

    def num_resident(self, path: Path, end: int) -> int:
        """How many leading tokens of a path, at most to the end of `end`'s page, have rows.

        Asked of every run before it is chosen; where the rows end before the run does, another donor is tried. What is
        found must stay until the plan ends, and the index must not be called.
        """
        return end

    def holes(self, path: Path, start: int, end: int) -> Sequence[Span]:
        """The parts of a span, resident up to its end, of which some layers have no rows; ascending."""
        return ()

    def unmovable(self, start: int, end: int, shift: int) -> Sequence[Span]:
        """The parts of a donor's span that a shift would move to another step; ascending, they may overlap."""
        return [part for steps in self._steps for part in steps.crossed(start, end, shift)]

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
