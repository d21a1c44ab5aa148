"""The adapter's state of one request: the attribute `pic` of SGLang's `Req`, set when the request is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from sglang_pic.adapter.namespace import OFF_LANE, Namespace, tree_key
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.media import Media
from sglang_pic.adapter.serve.options import Mode, RequestOptions
from sglang_pic.adapter.serve.rows import ON_DEVICE, Piece, Place, RowTier
from sglang_pic.adapter.sglang.seams import Req
from sglang_pic.core import DropReason, Exactness, Path, Plan, Reason, ReusePolicy, Span, Tokens, as_tokens


class Counted(NamedTuple):
    """Numbers of tokens."""

    spliced: int = 0
    behind_change: int = 0
    """Those of `spliced` after a changed field."""
    fetched: int = 0
    """Those of `spliced` that are read from the host."""


@dataclass(slots=True)
class PendingSplice:
    """A plan that waits for the forward pass, with its donors' rows."""

    plan: Plan
    pieces: list[Piece]
    """Of its runs, ascending."""
    locks: ExitStack = field(default_factory=ExitStack)
    """Locks on the donors' rows; closed when the copy is queued or the plan is dropped."""
    tier: RowTier = ON_DEVICE
    """Says how a pass reads the rows."""

    @classmethod
    def on_device(cls, plan: Plan, slots: Sequence[torch.Tensor]) -> PendingSplice:
        """A plan whose runs have their donors' rows in these slots of the device, in no path of the tree."""
        runs = zip(plan.runs, slots, strict=True)
        return cls(plan, [Piece(run, run.target_start, run.target_end, run.shift, each) for run, each in runs])

    def clip(self, end: int, whole: tuple[Span, ...] = ()) -> None:
        """Clip the plan to a prefill that ends at `end`, as `Plan.clip` does."""
        self.plan = self.plan.clip(end, whole)
        last = self.plan.runs[-1].target_end if self.plan.runs else 0
        self.pieces = [piece.part(piece.start, min(last, piece.end)) for piece in self.pieces if piece.start < last]

    def drop_conditional(self) -> None:
        """Have the conditional runs computed: their prompt has no end in this pass that asks for one of them."""
        self.plan = self.plan.without_conditional()
        left = {run.target_start for run in self.plan.runs}
        self.pieces = [piece for piece in self.pieces if piece.run.target_start in left]

    @property
    def num_fetched(self) -> int:
        """Tokens of which rows are read from the host."""
        return self.fetched_since(0)

    def fetched_since(self, start: int) -> int:
        """The same of the tokens from position `start` on."""
        fetched = [piece for piece in self.pieces if piece.place is not Place.DEVICE]
        return sum(max(0, piece.end - max(piece.start, start)) for piece in fetched)


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
    guarded: tuple[Span, ...] = ()
    """Spans computed because of changed fields in its donors' contexts."""
    lost: Fallback | None = None
    """Why the whole plan was dropped."""


_OF_SHORT_RUNS: Final = (DropReason.BELOW_MIN_RUN, DropReason.SINK)


@dataclass(slots=True)
class Counts:
    """Counts of a request so far, in tokens."""

    span: Span = (0, 0)
    """The prompt tokens counted with the last admitted chunk; those before its start were counted with earlier ones."""
    chunk_hit: int = 0
    """Spliced tokens; the next two as in `Counted`."""
    behind_change: int = 0
    fetched: int = 0
    guarded: int = 0
    """Tokens computed because of a changed field."""
    inherited: int = 0
    """Approximate tokens of its first exact prefix match."""
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
    base: Namespace | None = None
    """The namespace in the tree without its lane, if its donors serve the request, too."""
    policy: ReusePolicy | None = None
    """Its reuse policy on this server; None before it is received."""
    pinned_len: Callable[[Path], int] | None = None
    """`RowSource.pinned_len` for its plans, if a feature pins rows for it."""
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
    has_waited: bool = False
    """Whether it was left for a batch with room for all of its reordered text."""
    # `account.py`
    counts: Counts = field(default_factory=Counts)
    # `features/audit`
    drawn_chunk: tuple[int, Counted] | None = None
    """The `last_chunk` whose logits the audit needs."""

    def drop_plan(self, reason: Fallback | None = None) -> None:
        """Drop the plan, if there is one, and unlock its donors; `reason` is counted if the request is admitted."""
        if self.pending is not None:
            self.pending.locks.close()
            self.pending = None
            self.last_plan.lost = reason
            self.last_plan.guarded = ()

    def drop_conditional(self) -> None:
        """Have the plan's conditional runs computed, which count as left out."""
        assert self.pending is not None
        num_runs = len(self.pending.plan.runs)
        self.pending.drop_conditional()
        if num_dropped := num_runs - len(self.pending.plan.runs):
            before = self.last_plan.dropped
            self.last_plan.dropped = before | {DropReason.REORDERED: before.get(DropReason.REORDERED, 0) + num_dropped}

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
        if end < self.pending.plan.end:
            self.drop_conditional()
        self.pending.clip(end, self.whole)
        plan = self.pending.plan
        self.spliced += [SplicedRows(run.target_start, run.target_end, run.generation) for run in plan.runs]
        return plan

    @property
    def inherits(self) -> bool:
        """Whether it has spliced nothing so far, and its exact prefix match has approximate rows."""
        return self.counts.inherited > 0 and not self.counts.chunk_hit

    def compute_again(self, num_tokens: int) -> int:
        """A second pass computed spliced tokens of the last admitted chunk; its rows are no donors for all that.

        Returns those that were counted as spliced.
        """
        start, counted = self.last_chunk
        left = Counted(*(min(number, max(0, counted.spliced - num_tokens)) for number in counted))
        self.last_chunk = start, left
        self._add(Counted(*map(int.__sub__, left, counted)))
        return counted.spliced - left.spliced

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
        """Count the spliced tokens of the last admitted chunk; `plan` is the part of its plan that is counted."""
        start, counted = self.last_chunk
        if plan is not None:
            fetched = 0 if self.pending is None else self.pending.fetched_since(plan.prefix_len)
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


def tree_namespace(req: Req) -> Namespace:
    """The namespace of the request's rows in the tree."""
    return Namespace(req.extra_key, req.cache_salt)


def tokens_of(req: Req, end: int | None = None) -> Tokens:
    """The core's tokens of a request's prefill, or the first `end` of them."""
    tokens, media = as_tokens(req.full_untruncated_fill_ids[:end]), req.pic.media
    return tokens if media is None else media.over(tokens)


def needs_whole_batch(req: Req) -> bool:
    """Whether SGLang finds inputs or outputs of the request by its tokens' places in the flat batch.

    A batch with such a request cannot be narrowed to its gaps.
    """
    return bool(req.input_embeds is not None or req.positional_embed_overrides is not None or req.return_hidden_states)
