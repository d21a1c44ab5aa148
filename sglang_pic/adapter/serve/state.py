"""The adapter's state of one request: the attribute `pic` of SGLang's `Req`, set when the request is built."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
import torch

from sglang_pic.adapter.namespace import OFF_LANE, Namespace, tree_key
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.media import Media
from sglang_pic.adapter.serve.options import Mode, RequestOptions
from sglang_pic.adapter.serve.rows import HostRows, OnDevice, Rows
from sglang_pic.adapter.sglang.seams import Req
from sglang_pic.core import DropReason, Exactness, Plan, Reason, Run, Span


class Counted(NamedTuple):
    """Numbers of tokens."""

    spliced: int = 0
    behind_change: int = 0
    """Those of `spliced` after a changed field."""
    fetched: int = 0
    """Those of `spliced` that are read from the host."""


class Moves(NamedTuple):
    """The copies of a plan."""

    here: list[Move]
    """From the device."""
    split: list[Move]
    """From the device, with window rows from the host."""
    fetched: list[Move]
    """From the host."""


class Move(NamedTuple):
    """A part of a run that is copied from one place."""

    run: Run
    """The part, as a run of its own."""
    slots: torch.Tensor
    """Slots to read, int64: of the device's pool, or of the host's, in host memory."""
    shift: int
    """Positions by which the keys are rotated."""
    window_slots: torch.Tensor | None = None
    """The slots in the pool for windows, if there is one, on the device or on the host."""
    on_device: OnDevice | None = None
    """The place of the slots in the tree."""


@dataclass(slots=True)
class PendingSplice:
    """A plan that waits for the forward pass, with its donors' slots."""

    plan: Plan
    rows: list[Rows]
    """Each run's donor rows. If the plan was clipped, it has fewer and shorter runs: the first ones."""
    locks: ExitStack = field(default_factory=ExitStack)
    """Locks on the donors' rows; closed when the copy is queued or the plan is dropped."""
    host: HostRows | None = None
    """The rows in host memory, on servers with HiCache."""

    def moves(self) -> Moves:
        """The copies; a run is cut where its rows, or their window rows, lie elsewhere."""
        moves = Moves([], [], [])
        for run, rows in self._by_run:
            num_here, shift = min(run.num_tokens, len(rows.slots)), run.shift if rows.turn is None else rows.turn
            if num_here == run.num_tokens and not rows.windows_on_host:
                window_slots = None if rows.window_slots is None else rows.window_slots[:num_here]
                moves.here.append(Move(run, rows.slots[:num_here], shift, window_slots, rows.on_device))
                continue
            parts = [each for each in rows.windows_on_host if each.start < run.num_tokens]
            edges = {0, num_here, run.num_tokens, *(min(edge, run.num_tokens) for each in parts for edge in each[:2])}
            for start, end in itertools.pairwise(sorted(edges)):
                part = next((each.cut(start, end) for each in parts if each.num_within(start, end)), None)
                window_slots = None if rows.window_slots is None else rows.window_slots[start:end]
                if start < num_here:
                    slots, found = rows.slots[start:end], moves.here if part is None else moves.split
                else:
                    assert rows.host_slots is not None, "what is not on the device is on the host"
                    slots, found = rows.host_slots[start - num_here : end - num_here], moves.fetched
                    assert part is not None or window_slots is None, "so are its window rows"
                on_device = rows.on_device if start < num_here else None
                window_slots = window_slots if part is None else part.slots
                found.append(Move(_part(run, start, end), slots, shift, window_slots, on_device))
        return moves

    @property
    def num_fetched(self) -> int:
        """Tokens of which rows are read from the host."""
        # Where window rows are on the host, they are so for all rows that are.
        return sum(
            sum(each.num_within(0, run.num_tokens) for each in rows.windows_on_host)
            if rows.windows_on_host
            else run.num_tokens - min(run.num_tokens, len(rows.slots))
            for run, rows in self._by_run
        )

    @property
    def _by_run(self) -> Iterator[tuple[Run, Rows]]:
        return zip(self.plan.runs, self.rows[: len(self.plan.runs)], strict=True)


class Epoch(NamedTuple):
    """Events before a request was received; it reuses no rows of another epoch."""

    generation: int = 0
    """How often its namespace was switched on again."""
    num_weights: int = 0
    """How often the weights changed; rows of several sets are not donors."""
    restarts: int = 0
    """How often a fault emptied the chunk index."""


FIRST: Final = Epoch()


class Judged(NamedTuple):
    """Whether a request may reuse and donate, by its own properties; kept because SGLang frees its media early."""

    refusal: Fallback | None = None
    media: Media | None = None
    """Its images, if it has any that can be moved."""


@dataclass(slots=True)
class LastPlan:
    """Counts of the last plan, for metrics if its chunk is admitted."""

    dropped: dict[DropReason, int] = field(default_factory=dict)
    """Candidate runs that were left out, by reason."""
    changed_fields: tuple[Span, ...] = ()
    """The changed fields in its donors' contexts."""
    guarded: tuple[Span, ...] = ()
    """Spans computed because of them."""
    lost: Fallback | None = None
    """Why the whole plan was dropped."""


_OF_SHORT_RUNS: Final = (DropReason.BELOW_MIN_RUN, DropReason.SINK)


@dataclass(slots=True)
class Counts:
    """Counts of a request so far, in tokens."""

    chunk_hit: int = 0
    """Spliced tokens; the next two as in `Counted`."""
    behind_change: int = 0
    fetched: int = 0
    guarded: int = 0
    """Tokens computed because of a changed field."""
    inherited: int = 0
    """Approximate tokens of its first exact prefix match."""
    fields: set[Span] = field(default_factory=set)
    """The changed fields counted so far."""
    reasons: Counter[Reason] = field(default_factory=Counter)
    """Why it, or runs of it, were computed instead of spliced."""

    @property
    def reason(self) -> Reason | None:
        """Why nothing was spliced: a reason of the whole request, else of most runs; those of short ones come last."""
        if self.chunk_hit or not self.reasons:
            return None

        def weight(reason: Reason) -> tuple[bool, bool, int]:
            is_whole = isinstance(reason, Fallback)
            return is_whole, reason not in _OF_SHORT_RUNS, self.reasons[reason]

        return max(self.reasons, key=weight)


class SplicedRows(NamedTuple):
    """A span of a request that was spliced."""

    start: int
    end: int
    generation: int
    """Changed fields that its rows depend on."""


@dataclass(slots=True)
class RequestState:
    """The adapter's state of one request, each part written by the station that owns it.

    A plan is made by `planning.py`, clipped at admission, and taken by the forward pass. A request that ends before
    drops its plan when its rows are released.
    """

    # `receive.py`
    options: RequestOptions
    namespace: Namespace = field(default_factory=Namespace)
    """The client's namespace, with the request's LoRA adapter and without our marks."""
    lane: str | None = None
    """The lane of its rows in the namespace, as for `tree_key`."""
    is_stricter: bool = False
    """Whether the server's preset is bolder than the request's: rows without a lane may depend on bolder splices."""
    epoch: Epoch = FIRST
    diverted: Fallback | None = None
    """Why it is served as if it had opted out; set by `tree.py`, too."""
    # `tree.py`
    is_faulty: bool = False
    """Whether an exception ended its reuse; the rest is computed."""
    # `planning.py`
    judged: Judged | None = None
    """Set by the first call of `refusal`."""
    pending: PendingSplice | None = None
    """The plan that waits for the forward pass."""
    last_plan: LastPlan = field(default_factory=LastPlan)
    # `admission.py`
    matched_len: int | None = None
    """Tokens of the first exact prefix match; `None` until the request is admitted."""
    prefix: Exactness = field(default_factory=Exactness)
    """Exactness of their rows."""
    spliced: list[SplicedRows] = field(default_factory=list)
    """Ascending."""
    last_chunk: tuple[int, Counted] = field(default_factory=lambda: (0, Counted()))
    """Start of the last admitted chunk, and the numbers added to `counts` for it."""
    # `account.py`
    counts: Counts = field(default_factory=Counts)
    # Features
    of_features: dict[str, Any] = field(default_factory=dict)
    """The features' own state of the request, by name."""

    def drop_plan(self, reason: Fallback | None = None) -> None:
        """Drop the plan, if there is one, and unlock its donors; `reason` is counted if the request is admitted."""
        if self.pending is not None:
            self.pending.locks.close()
            self.pending = None
            self.last_plan.lost = reason
            self.last_plan.changed_fields = self.last_plan.guarded = ()

    @property
    def media(self) -> Media | None:
        """Its images, if they can be moved."""
        return None if self.judged is None else self.judged.media

    @property
    def whole(self) -> tuple[Span, ...]:
        """The spans of its images."""
        return () if self.media is None else self.media.spans

    def admit(self, start: int, end: int, *, first_chunk: bool) -> Plan | None:
        """Clip the plan to the admitted chunk `[start, end)`, and return it."""
        if first_chunk:
            self.matched_len = start
        self.last_chunk = start, Counted()
        if self.pending is None:
            return None
        self.pending.plan = plan = self.pending.plan.clip(end, self.whole)
        self.spliced += [SplicedRows(run.target_start, run.target_end, run.generation) for run in plan.runs]
        return plan

    @property
    def inherits(self) -> bool:
        """Whether it has spliced nothing so far, and its exact prefix match has approximate rows."""
        return self.counts.inherited > 0 and not self.counts.chunk_hit

    def take_plan(self) -> PendingSplice | None:
        """Give the plan with its donors' locks to the caller; `None` if it has no runs."""
        pending, self.pending = self.pending, None
        if pending is not None and not pending.plan.runs:
            pending.locks.close()
            return None
        return pending

    def undo_admission(self) -> int:
        """Undo the splice of the last admitted chunk; returns the spliced tokens counted for it."""
        self.drop_plan()
        start, counted = self.last_chunk
        self.spliced = [rows for rows in self.spliced if rows.start < start]
        self.last_chunk = start, Counted()
        self._add(Counted(*(-number for number in counted)))
        return counted.spliced

    def count(self, plan: Plan | None) -> Counted:
        """Count the spliced tokens of the last admitted chunk."""
        start, counted = self.last_chunk
        if plan is not None:
            fetched = 0 if self.pending is None else self.pending.num_fetched
            counted = Counted(plan.num_spliced, plan.num_behind_change, fetched)
            self.last_chunk = start, counted
            self._add(counted)
        return counted

    def _add(self, counted: Counted) -> None:
        self.counts.chunk_hit += counted.spliced
        self.counts.behind_change += counted.behind_change
        self.counts.fetched += counted.fetched

    def release_row(self) -> None:
        """Forget the request's rows after its end or a retraction; a later prefill starts again."""
        self.drop_plan()
        self.matched_len, self.prefix, self.last_chunk = None, Exactness(), (0, Counted())
        self.spliced.clear()


def _part(run: Run, start: int, end: int) -> Run:
    """Tokens `[start, end)` of a run."""
    if (start, end) == (0, run.num_tokens):
        return run
    first, last = run.target_start + start, run.target_start + end
    return msgspec.structs.replace(run, target_start=first, target_end=last, donor_start=run.donor_start + start)


def is_apart(req: Req) -> bool:
    """Whether the request's rows are in the lane of requests that opted out, without spliced rows."""
    state: RequestState = req.pic
    # Later turns of a streaming session continue with the first turn's rows, whatever their options.
    is_streaming = req.session is not None and bool(req.session.streaming)
    return state.options.mode is Mode.OFF or state.diverted is not None or is_streaming


def keep_apart(req: Req) -> None:
    """Move a request that has no rows yet to the lane of requests that opted out."""
    state: RequestState = req.pic
    state.lane = OFF_LANE
    req.extra_key = tree_key(state.namespace.extra_key, adapter=state.namespace.adapter, lane=OFF_LANE)


def goes_by_place(req: Req) -> bool:
    """Whether SGLang finds inputs or outputs of the request by its tokens' places in the flat batch.

    A batch with such a request cannot be narrowed to its gaps.
    """
    return bool(req.input_embeds is not None or req.positional_embed_overrides is not None or req.return_hidden_states)
