"""What the adapter remembers of one request while SGLang serves it.

It hangs on SGLang's `Req` as the attribute `pic`, set when the request is built.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from sglang_pic.core import DropReason, Exactness, Plan, Run, Span, Tokens, common_len


class Counted(NamedTuple):
    """Spliced tokens."""

    spliced: int = 0
    behind_change: int = 0
    """Of them, spliced behind a changed field."""
    fetched: int = 0
    """Of them, read from the host."""
    stored: int = 0
    """Of those, brought there from a store for this request."""


class Move(NamedTuple):
    """A part of a run whose rows are copied together: all of them from the device, or all from the host."""

    run: Run
    """The part, as a run of its own."""
    slots: torch.Tensor
    """Where they are read, int64: slots of the device's pool, or of the host's, in host memory."""
    shift: int
    """By how many positions their keys turn."""
    window_slots: torch.Tensor | None = None
    """Their slots in the pool for windows, where there is one."""
    on_device: OnDevice | None = None
    """Where in the tree the device has them."""


@dataclass(slots=True)
class PendingSplice:
    """A plan on its way to the forward pass, with its donors' slots."""

    plan: Plan
    rows: list[Rows]
    """For each run where it is read from. A plan that was clipped since has fewer and shorter runs: the first ones."""
    locks: ExitStack = field(default_factory=ExitStack)
    """Keeps the donors' rows in the tree. Whoever holds the splice closes it, once the rows have been copied or are not
    needed any more."""
    host: HostRows | None = None
    """Has the rows that are in host memory, on servers with HiCache."""

    def moves(self) -> tuple[list[Move], list[Move]]:
        """What is copied: from the device, and from the host."""
        moves, fetches = list[Move](), list[Move]()
        for run, rows in zip(self.plan.runs, self.rows[: len(self.plan.runs)], strict=True):
            slots, shift = rows.slots[: run.num_tokens], run.shift if rows.turn is None else rows.turn
            start, end = len(slots), run.num_tokens
            if start:
                window_slots = None if rows.window_slots is None else rows.window_slots[:start]
                moves.append(Move(_part(run, 0, start), slots, shift, window_slots, rows.on_device))
            if start < end:
                assert rows.host_slots is not None, "what is not on the device is on the host"
                fetches.append(Move(_part(run, start, end), rows.host_slots[: end - start], shift))
        return moves, fetches

    @property
    def num_fetched(self) -> int:
        """Tokens that are read from the host."""
        return sum(move.run.num_tokens for move in self.moves()[1])


class Epoch(NamedTuple):
    """What had happened before a request was received; rows of another epoch are not for it."""

    generation: int = 0
    """How often its namespace had been switched on again."""
    num_weights: int = 0
    """How often the weights had changed: rows of more than one set donate nothing."""
    restarts: int = 0
    """How often the chunk index had been lost to a fault."""


FIRST: Final = Epoch()


class Judged(NamedTuple):
    """Whether a request may reuse and donate, by itself: SGLang lets go of its media before its rows."""

    refusal: Fallback | None = None
    media: Media | None = None
    """Its images, if it has some that can be moved."""


@dataclass(slots=True)
class LastPlan:
    """What is to be counted of the last plan, should its chunk be admitted."""

    dropped: dict[DropReason, int] = field(default_factory=dict)
    """Candidate runs that were left out, by reason."""
    changed_fields: tuple[Span, ...] = ()
    """The changed fields in its donors' contexts."""
    guarded: tuple[Span, ...] = ()
    """What is computed because of them."""
    lost: Fallback | None = None
    """Why it was dropped as a whole."""


@dataclass(slots=True)
class Counts:
    """What was counted of a request so far, in tokens."""

    chunk_hit: int = 0
    """Spliced."""
    behind_change: int = 0
    """Of them, behind a changed field."""
    fetched: int = 0
    """Of them, read from the host."""
    stored: int = 0
    """Of those, brought there from a store for this request."""
    guarded: int = 0
    """Computed because of a changed field."""
    inherited: int = 0
    """Of its first exact prefix match, those counted as approximate."""
    fields: set[Span] = field(default_factory=set)
    """The changed fields that were counted."""


class SplicedRows(NamedTuple):
    """A span of a request's row that holds spliced rows."""

    start: int
    end: int
    generation: int
    """How many changed fields they have before them."""


@dataclass(slots=True)
class RequestState:
    """The adapter's side of one request, each part written by the station that owns it.

    A plan is made by `planning.py`, clipped and kept or dropped at admission, and taken by the forward pass. A request
    that leaves before that drops its plan when its row is released.
    """

    # `receive.py`
    options: RequestOptions
    namespace: Namespace = field(default_factory=Namespace)
    """As the client named it, with the request's LoRA adapter and without our marks."""
    lane: str | None = None
    """Where in its namespace its rows are, as `tree_key` takes it."""
    is_stricter: bool = False
    """The server's preset is bolder than the request's: what it computed may stand behind what it spliced."""
    epoch: Epoch = FIRST
    diverted: Fallback | None = None
    """Why it is served as if it had opted out, although it did not ask for that; `tree.py` sets it, too."""
    # `tree.py`
    is_faulty: bool = False
    """Whether its reuse failed with an exception; the rest of it is computed."""
    # `planning.py`
    judged: Judged | None = None
    """None until it was asked for."""
    pending: PendingSplice | None = None
    """The plan that waits for the forward pass."""
    last_plan: LastPlan = field(default_factory=LastPlan)
    # `admission.py`
    matched_len: int | None = None
    """Tokens of the first exact prefix match; `None` until the request is admitted."""
    prefix: Exactness = field(default_factory=Exactness)
    """What is known of their rows."""
    spliced: list[SplicedRows] = field(default_factory=list)
    """Ascending."""
    last_chunk: tuple[int, Counted] = field(default_factory=lambda: (0, Counted()))
    """Where the chunk that was admitted last begins, and what was added for it to `counts`."""
    # `accounting.py`
    counts: Counts = field(default_factory=Counts)
    # Features
    of_features: dict[str, Any] = field(default_factory=dict)
    """What features keep of the request, each under its name."""

    def drop_plan(self, reason: Fallback | None = None) -> None:
        """Give the plan up, if there is one, and unlock its donors; `reason` is counted if the request is admitted."""
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
        """Where its images are."""
        return () if self.media is None else self.media.spans

    def admit(self, start: int, end: int, *, first_chunk: bool) -> Plan | None:
        """Note that `[start, end)` of the row is prefilled next, and clip the plan to it; returns the clipped plan."""
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
        """Hand the plan and its donors' locks to the forward pass; `None` where there is nothing to splice."""
        pending, self.pending = self.pending, None
        if pending is not None and not pending.plan.runs:
            pending.locks.close()
            return None
        return pending

    def undo_admission(self) -> int:
        """Take back the splice of the chunk that was admitted last; returns how many tokens were counted for it."""
        self.drop_plan()
        start, counted = self.last_chunk
        self.spliced = [rows for rows in self.spliced if rows.start < start]
        self.last_chunk = start, Counted()
        self._add(Counted(*(-number for number in counted)))
        return counted.spliced

    def count(self, plan: Plan | None) -> Counted:
        """Count what the chunk that was admitted last splices."""
        start, counted = self.last_chunk
        if plan is not None:
            fetched = 0 if self.pending is None else self.pending.num_fetched
            loaded = self.of_features.get(LOADED_PATHS, ())
            stored = min(fetched, sum(_num_loaded(run, loaded) for run in plan.runs)) if loaded else 0
            counted = Counted(plan.num_spliced, plan.num_behind_change, fetched, stored)
            self.last_chunk = start, counted
            self._add(counted)
        return counted

    def _add(self, counted: Counted) -> None:
        self.counts.chunk_hit += counted.spliced
        self.counts.behind_change += counted.behind_change
        self.counts.fetched += counted.fetched
        self.counts.stored += counted.stored

    def release_row(self) -> None:
        """Forget the row, because the request ended or was retracted; a later prefill starts anew."""
        self.drop_plan()
        self.matched_len, self.prefix, self.last_chunk = None, Exactness(), (0, Counted())
        self.spliced.clear()


LOADED_PATHS: Final = "loaded"
"""Of `of_features`: paths that were loaded for the request from a store, with their tokens and from where on."""


def _num_loaded(run: Run, loaded: Sequence[tuple[Tokens, int]]) -> int:
    """How many rows of a run were loaded from a store for its request."""
    found = 0
    for tokens, start in loaded:
        end = min(run.donor_end, len(tokens))
        if end > max(start, run.donor_start) and common_len(run.donor.tokens(end), tokens) >= end:
            found = max(found, end - max(start, run.donor_start))
    return found


def _part(run: Run, start: int, end: int) -> Run:
    """Tokens `[start, end)` of a run."""
    if (start, end) == (0, run.num_tokens):
        return run
    first, last = run.target_start + start, run.target_start + end
    return msgspec.structs.replace(run, target_start=first, target_end=last, donor_start=run.donor_start + start)


def is_apart(req: Req) -> bool:
    """Whether the request's rows are kept apart from spliced ones, in the namespace of those that opted out."""
    state: RequestState = req.pic
    # A later turn of a streaming session goes on with the row of the first, whatever it asks for itself.
    is_streaming = req.session is not None and bool(req.session.streaming)
    return state.options.mode is Mode.OFF or state.diverted is not None or is_streaming


def keep_apart(req: Req) -> None:
    """Give a request that holds no row the key of those that opted out."""
    state: RequestState = req.pic
    state.lane = OFF_LANE
    req.extra_key = tree_key(state.namespace.extra_key, adapter=state.namespace.adapter, lane=OFF_LANE)


def goes_by_place(req: Req) -> bool:
    """Whether SGLang reads or writes something of the request at its tokens' places in the flat batch.

    A batch with such a request cannot be narrowed to its gaps.
    """
    return bool(req.input_embeds is not None or req.positional_embed_overrides is not None or req.return_hidden_states)
