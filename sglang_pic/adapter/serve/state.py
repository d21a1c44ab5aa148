"""What the adapter remembers of one request while SGLang serves it.

It hangs on SGLang's `Req` as the attribute `pic`, set when the request is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch

from sglang_pic.adapter.namespace import OFF_LANE, Namespace, tree_key
from sglang_pic.adapter.seams import Req
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.media import Media
from sglang_pic.adapter.serve.options import Mode, RequestOptions
from sglang_pic.adapter.serve.rows import HostRows, OnDevice, Rows
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

    @property
    def donors(self) -> list[OnDevice]:
        """Where what is read of the device is in the tree."""
        return [rows.on_device for _, rows in self._by_run if rows.on_device is not None]

    @property
    def shifts(self) -> list[int]:
        """For each of `sources`, then of `fetches`, by how many positions its keys turn."""
        turns = [rows.turn for _, rows in self._by_run if rows.turn is not None]
        return turns or [run.shift for run, _ in (*self.sources, *self.fetches)]

    @property
    def sources(self) -> list[tuple[Run, torch.Tensor]]:
        """The plan's runs as far as they are on the device, each with the slots it is read from."""
        found = [(run, rows.slots[: run.num_tokens]) for run, rows in self._by_run]
        return [(_part(run, 0, len(slots)), slots) for run, slots in found if len(slots)]

    @property
    def window_sources(self) -> list[torch.Tensor]:
        """For each of `sources` its slots in the pool for windows, if there is one."""
        return [rows.window_slots[: run.num_tokens] for run, rows in self._by_run if rows.window_slots is not None]

    @property
    def num_fetched(self) -> int:
        """Tokens that are read from the host."""
        return sum(run.num_tokens for run, _ in self.fetches)

    @property
    def fetches(self) -> list[tuple[Run, torch.Tensor]]:
        """What of the runs is on the host, each with the host's slots it is read from."""
        found = []
        for run, rows in self._by_run:
            start, end = len(rows.slots), run.num_tokens
            if start < end:
                assert rows.host_slots is not None, "what is not on the device is on the host"
                found.append((_part(run, start, end), rows.host_slots[: end - start]))
        return found

    @property
    def _by_run(self) -> Iterator[tuple[Run, Rows]]:
        return zip(self.plan.runs, self.rows[: len(self.plan.runs)], strict=True)


@dataclass(slots=True)
class RequestState:
    """The adapter's side of one request.

    A plan is made by `planning.py`, clipped and kept or dropped at admission, and taken by the forward pass. A request
    that leaves before that drops its plan when its row is released.
    """

    options: RequestOptions
    namespace: Namespace = field(default_factory=Namespace)
    """As the client named it, with the request's LoRA adapter and without our marks."""
    generation: int = 0
    """How often the namespace had been switched on again when the request was received."""
    num_weights: int = 0
    """How often the weights had changed when the request was received: rows of more than one set donate nothing."""
    restarts: int = 0
    """How often the chunk index had been lost to a fault when the request was received."""
    lane: str | None = None
    """Where in its namespace its rows are, as `tree_key` takes it."""
    is_stricter: bool = False
    """The server's preset is bolder than the request's: what it computed may stand behind what it spliced."""
    diverted: Fallback | None = None
    """Why it is served as if it had opted out: audits or an operator have switched splicing off."""
    is_drawn: bool = False
    """The audit wants the logits of the pass that is admitted."""
    is_faulty: bool = False
    """Whether its reuse failed with an exception; the rest of it is computed."""
    serves_media: bool | None = None
    """Whether its media can be moved; `None` until they are looked at, and where there are none."""
    media: Media | None = None
    """Its images, if so."""
    pending: PendingSplice | None = None
    """The plan that waits for the forward pass."""
    dropped: dict[DropReason, int] = field(default_factory=dict)
    """Candidate runs that the last plan left out, by reason."""
    changed_fields: tuple[Span, ...] = ()
    """The changed fields that the last plan, if any, found in its donors' contexts."""
    guarded: tuple[Span, ...] = ()
    """What that plan computes because of them."""
    lost_plan: Fallback | None = None
    """Why the last plan was dropped as a whole."""
    matched_len: int | None = None
    """Tokens of the first exact prefix match; `None` until the request is admitted."""
    prefix: Exactness = field(default_factory=Exactness)
    """What is known of their rows; admission fills it."""
    num_inherited: int = 0
    """Of these tokens, those that were counted as approximate."""
    num_chunk_hit: int = 0
    """Tokens served by splicing so far."""
    num_behind_change: int = 0
    """Of them, spliced behind a changed field."""
    num_fetched: int = 0
    """Of them, read from the host."""
    num_stored: int = 0
    """Of those, brought there from a store for this request."""
    num_guarded: int = 0
    """Tokens computed so far because of a changed field."""
    counted_fields: set[Span] = field(default_factory=set)
    """The changed fields that were counted."""
    is_looked_up: bool = False
    """Whether its text was looked up in HiCache's store, or was not to be."""
    loaded: list[tuple[Tokens, int]] = field(default_factory=list)
    """The paths that were loaded for it from there, and from where on."""
    spliced: list[tuple[int, int]] = field(default_factory=list)
    """Spans of the row that hold spliced rows, ascending."""
    generations: list[tuple[int, int]] = field(default_factory=list)
    """Where each of them begins, and how many changed fields its rows have behind them."""
    admitted_from: int = 0
    """Where the chunk that was admitted last begins."""
    counted: Counted = field(default_factory=Counted)
    """What was added for that chunk to `num_chunk_hit` and the numbers behind it."""

    def drop_plan(self, reason: Fallback | None = None) -> None:
        """Give the plan up, if there is one, and unlock its donors; `reason` is counted if the request is admitted."""
        if self.pending is not None:
            self.pending.locks.close()
            self.pending = None
            self.lost_plan = reason
            self.changed_fields = self.guarded = ()

    @property
    def whole(self) -> tuple[Span, ...]:
        """Where its images are."""
        return () if self.media is None else self.media.spans

    def admit(self, start: int, end: int, *, first_chunk: bool) -> Plan | None:
        """Note that `[start, end)` of the row is prefilled next, and clip the plan to it; returns the clipped plan."""
        if first_chunk:
            self.matched_len = start
        self.admitted_from, self.counted = start, Counted()
        if self.pending is None:
            return None
        self.pending.plan = plan = self.pending.plan.clip(end, self.whole)
        self.spliced += [(run.target_start, run.target_end) for run in plan.runs]
        self.generations += [(run.target_start, run.generation) for run in plan.runs]
        return plan

    @property
    def inherits(self) -> bool:
        """Whether it has spliced nothing so far, and its exact prefix match has approximate rows."""
        return self.num_inherited > 0 and not self.num_chunk_hit

    def take_plan(self) -> PendingSplice | None:
        """Hand the plan and its donors' locks to the forward pass; `None` where there is nothing to splice."""
        pending, self.pending = self.pending, None
        if pending is not None and not pending.plan.runs:
            pending.locks.close()
            return None
        return pending

    def undo_admission(self) -> Counted:
        """Take back the splice of the chunk that was admitted last; returns what was counted for it, as `counted`."""
        self.drop_plan()
        self.is_drawn = False
        self.spliced = [span for span in self.spliced if span[0] < self.admitted_from]
        self.generations = [step for step in self.generations if step[0] < self.admitted_from]
        counted, self.counted = self.counted, Counted()
        self.num_chunk_hit -= counted.spliced
        self.num_behind_change -= counted.behind_change
        self.num_fetched -= counted.fetched
        self.num_stored -= counted.stored
        return counted

    def count(self, plan: Plan | None) -> Counted:
        """Count what the chunk that was admitted last splices."""
        if plan is not None:
            num_fetched = 0 if self.pending is None else self.pending.num_fetched
            num_stored = min(num_fetched, sum(map(self._num_loaded, plan.runs))) if self.loaded else 0
            self.counted = Counted(plan.num_spliced, plan.num_behind_change, num_fetched, num_stored)
            self.num_chunk_hit += self.counted.spliced
            self.num_behind_change += self.counted.behind_change
            self.num_fetched += self.counted.fetched
            self.num_stored += self.counted.stored
        return self.counted

    def _num_loaded(self, run: Run) -> int:
        """How many rows of a run were loaded from a store for this request."""
        found = 0
        for tokens, start in self.loaded:
            end = min(run.donor_end, len(tokens))
            if end > max(start, run.donor_start) and common_len(run.donor.tokens(end), tokens) >= end:
                found = max(found, end - max(start, run.donor_start))
        return found

    def release_row(self) -> None:
        """Forget the row, because the request ended or was retracted; a later prefill starts anew."""
        self.drop_plan()
        self.matched_len, self.prefix = None, Exactness()
        self.is_drawn = False
        self.spliced.clear()
        self.generations.clear()


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
