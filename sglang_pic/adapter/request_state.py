"""What the adapter remembers of one request while SGLang serves it.

It hangs on SGLang's `Req` as the attribute `pic`, set when the request is built. It owns the request's options, the
plan that waits for its forward pass, and which spans of its row were spliced. It must not know how plans are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sglang_pic.adapter.options import RequestOptions
from sglang_pic.core import DropReason

__all__ = ["PendingSplice", "RequestState", "RunSource"]


class RunSource(NamedTuple):
    """One run of a plan with the slots of its donor, resolved in the tree and locked."""

    target_start: int
    target_end: int
    shift: int
    slots: torch.Tensor
    """Donor slots, `[target_end - target_start]`, int64, on the pool's device."""


@dataclass(slots=True)
class PendingSplice:
    """A plan on its way to the forward pass, with the tree locks that keep its donors.

    `runs` ascend and do not overlap. `locks` are receipts of the tree; whoever drops a `PendingSplice` gives them back.
    """

    prefix_len: int
    end: int
    runs: list[RunSource]
    locks: list[object]

    @property
    def num_spliced(self) -> int:
        """Tokens that are copied instead of computed."""
        return sum(run.target_end - run.target_start for run in self.runs)

    @property
    def num_computed(self) -> int:
        """Tokens that the gap prefill computes."""
        return self.end - self.prefix_len - self.num_spliced

    def gaps(self) -> list[tuple[int, int]]:
        """The spans `[start, end)` between the runs, in order; never empty, the last one ends the request."""
        gaps, cursor = [], self.prefix_len
        for run in self.runs:
            if cursor < run.target_start:
                gaps.append((cursor, run.target_start))
            cursor = run.target_end
        if cursor < self.end:
            gaps.append((cursor, self.end))
        return gaps

    def clip(self, end: int) -> None:
        """Keep only `[prefix_len, end)`; the last token of what is left is computed, as its logits are wanted."""
        kept = []
        for run in self.runs:
            stop = min(run.target_end, end - 1)
            if stop > run.target_start:
                kept.append(run._replace(target_end=stop, slots=run.slots[: stop - run.target_start]))
        self.runs, self.end = kept, end

    def cut(self, budget: int, page_size: int) -> int:
        """The furthest page-aligned end of a chunk that computes at most `budget` tokens.

        Returns:
            A position in `(prefix_len, end]`; `end` itself where everything fits. At least one page is always
            taken, so that a request makes progress.
        """
        if self.num_computed <= budget:
            return self.end
        cursor, left = self.prefix_len, max(budget, 1)
        for run in self.runs:
            gap = run.target_start - cursor
            if gap > left:
                break
            left -= gap
            cursor = run.target_end
        furthest = min(cursor + left, self.end)
        aligned = furthest // page_size * page_size
        return aligned if aligned > self.prefix_len else min(self.end, self.prefix_len + page_size)


@dataclass(slots=True)
class RequestState:
    """The adapter's side of one request."""

    options: RequestOptions
    pending: PendingSplice | None = None
    """Planned and locked; taken by the forward pass that executes it."""

    dropped: dict[DropReason, int] = field(default_factory=dict)
    """Candidate runs that the last plan left out, by reason."""

    matched_len: int | None = None
    """Tokens of the first exact prefix match; `None` until the request is admitted."""

    num_chunk_hit: int = 0
    """Tokens served by splicing so far."""

    spliced: list[tuple[int, int]] = field(default_factory=list)
    """Spans of the row that hold spliced rows, ascending."""

    def forget_row(self) -> None:
        """The row was given back (retraction): whatever it held is gone, and the next prefill starts anew."""
        self.matched_len = None
        self.spliced.clear()
