"""What the adapter remembers of one request while SGLang serves it.

It hangs on SGLang's `Req` as the attribute `pic`, set when the request is built. It owns the request's options, the
plan that waits for its forward pass, and which spans of its row were spliced. It must not know how plans are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sglang_pic.adapter.serve.options import RequestOptions
from sglang_pic.core import DropReason, Plan

__all__ = ["Namespace", "PendingSplice", "RequestState", "RunSource", "is_streaming"]

Namespace = tuple[str | None, str | None]
"""What nothing crosses: SGLang's extra key (with the adapter in it) and the cache salt."""


class RunSource(NamedTuple):
    """One run of a plan with the slots of its donor, resolved in the tree and locked."""

    target_start: int
    target_end: int
    shift: int
    slots: torch.Tensor
    """Donor slots, `[target_end - target_start]`, int64, on the pool's device."""


@dataclass(slots=True)
class PendingSplice:
    """A plan on its way to the forward pass, with its donors' slots and the tree locks that keep them.

    `slots` has one tensor per run of the plan, at least as long as the run. `locks` are receipts of the tree; whoever
    drops a `PendingSplice` gives them back.
    """

    plan: Plan
    slots: list[torch.Tensor]
    locks: list[object]
    rotate: bool = True
    """False in the naive control of an experiment only."""
    flip: bool = False
    """True in a test of the audit only: the spliced rows are corrupted."""

    @property
    def runs(self) -> list[RunSource]:
        """The plan's runs with the slots they are read from."""
        return [
            RunSource(run.target_start, run.target_end, run.shift if self.rotate else 0, slots[: run.num_tokens])
            # A clipped plan has fewer runs; those that are left are its first ones.
            for run, slots in zip(self.plan.runs, self.slots, strict=False)
        ]

    def clip(self, end: int) -> None:
        """Keep only `[prefix_len, end)` of the plan."""
        self.plan = self.plan.clip(end)


@dataclass(slots=True)
class RequestState:
    """The adapter's side of one request."""

    options: RequestOptions
    namespace: Namespace = (None, None)
    """As the client named it, without the marks of ours that its key in the tree may have."""

    generation: int = 0
    """How often audits had switched the namespace off, and an operator on again, when the request was received."""

    is_diverted: bool = False
    """Received while the namespace was off: served as if it had opted out."""

    is_drawn: bool = False
    """The audit wants the logits of the pass that is admitted."""

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
        self.is_drawn = False
        self.spliced.clear()


def is_streaming(req: Any) -> bool:
    """Whether SGLang's request is a turn of a streaming session; it is served as one that opted out, on every turn."""
    return req.session is not None and bool(req.session.streaming)
