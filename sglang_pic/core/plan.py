"""The plan of one request as a value: prefix, runs and gaps. It does not change with the index that made it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Annotated, NamedTuple

import msgspec

from sglang_pic.core.path import Path
from sglang_pic.core.policy import ReusePolicy
from sglang_pic.core.spans import Span, intersect_spans, whole_part
from sglang_pic.settings import Range, check


class Reason(Enum):
    """A value of a metric's label: its name and a sentence, such as a reason. The planner's are in `DropReason`."""

    description: str

    def __new__(cls, label: str, description: str) -> Reason:
        """The label is the value."""
        member = object.__new__(cls)
        member._value_ = label
        member.description = description
        return member

    # Enum's own is a Python function, and planners count by reason.
    __hash__ = object.__hash__


class DropReason(Reason):
    """Why the planner left out a candidate run."""

    BELOW_MIN_RUN = "below_min_run", "The equal text is shorter than the minimum run."
    BUDGET = "budget", "Planning further would have taken too long for a prompt of that length."
    CHANGED_FIELD = "changed_field", "A field before the run has another value than it had before the donor."
    COST_GATE = "cost_gate", "Splicing would have cost more than computing."
    DONOR_EVICTED = "donor_evicted", "The donor's rows had left the radix tree."
    GENERATION = "generation", "The donor's rows have too many changed fields behind them."
    MAX_GAPS = "max_gaps", "The plan had more gaps than the settings or the attention backend allow."
    MAX_RUNS = "max_runs", "The plan had more runs than the settings allow."
    POSITION_STEP = (
        "position_step",
        "The model scales or cuts its attention otherwise at the donor's positions.",
    )
    REORDERED = (
        "reordered",
        "The text has another order than in its donor, or most of the prompt's text is from three donors or more.",
    )
    SINK = "sink", "The rows are among the first `sink_tokens` positions, of this prompt or of the donor's."
    TAIL = (
        "tail",
        "The run is in the last `tail_tokens` of the prompt; or its donor read another text before, and it is in the "
        "prompt's last `other_tail_tokens`; or it begins soon after such text, or text its donor lacks, near the end, "
        "or after text that is gone.",
    )


class Context(Enum):
    """How the text before a donor differs from the text before its run; the worst of several."""

    SAME = "same"
    """It does not: the rows were computed after exactly the tokens before the run."""
    MOVED = "moved"
    """Text was moved, removed or added, but no field has another value."""
    CHANGED = "changed"
    """A field has another value: a small difference between equal flanks."""
    OTHER = "other"
    """Most of it is another text."""


def num_reads(spans: Iterable[Span]) -> int:
    """How many tokens are before each token of the spans of a prompt, added up: what attention to all of them reads."""
    return sum((end - start) * (start + end - 1) // 2 for start, end in spans)


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of prefill passes on one machine and model, in microseconds.

    A pass over `n` tokens takes `max(floor_us, n * computed_token_us)`: short passes wait for launches or weights.
    """

    computed_token_us: float
    """A computed token in a long pass."""
    spliced_token_us: float
    fetched_token_us: float = 0.0
    """Added to a spliced token whose rows are on the host."""
    gap_us: float
    """A further gap in a pass, at position 0."""
    gap_context_us: float = 0.0
    """Added to a gap for each token before it, which its attention reads."""
    gap_token_us: float = 0.0
    """A computed token in a long pass with gaps, if that is more: with MLA the whole pass is absorbed."""
    token_context_us: float = 0.0
    """Added to a computed token for each token before it, if a pass with gaps adds more."""
    gap_token_context_us: float = 0.0
    """The same in a pass with gaps."""
    request_us: float = 0.0
    """Laying out a pass with gaps and starting its copy."""
    floor_us: float = 0.0
    """The shortest pass without gaps."""
    gap_floor_us: float = 0.0
    """The shortest pass with gaps, less `request_us`, if that is more than `floor_us`: it has no captured graph."""

    def saves(self, num_tokens: int, gap_start: int | None) -> float:
        """The time that splicing `num_tokens` more saves in a long pass, less that of a gap at `gap_start`, if any."""
        gap_us = 0.0 if gap_start is None else self.gap_us + gap_start * self.gap_context_us
        return num_tokens * (self.computed_token_us - self.spliced_token_us) - gap_us

    def request_saves(
        self,
        computed: Sequence[Span],
        spliced: Iterable[Span],
        *,
        num_before: int = 0,
        num_fetched: int = 0,
        reads_before: int = 0,
    ) -> float:
        """The time that splicing saves a whole request; 0 or less if computing all of it takes no longer.

        Args:
            computed: the spans of its prompt that it computes in any case, in order: its gaps.
            spliced: the spans that it would splice.
            num_before: tokens that other requests compute in the same pass.
            num_fetched: spliced tokens whose rows are on the host.
            reads_before: `num_reads` of what other requests compute in the same pass.
        """
        spliced, added_gaps = [*spliced], computed[1:]
        num_spliced = sum(end - start for start, end in spliced)
        least = num_before + sum(end - start for start, end in computed)
        reads = reads_before + num_reads(computed)
        whole_us = self.computed_token_us * (least + num_spliced)
        whole_us += self.token_context_us * (reads + num_reads(spliced))
        rest = self._with_gaps_us(least, reads)
        moved_us = num_spliced * self.spliced_token_us + num_fetched * self.fetched_token_us
        gaps_us = len(added_gaps) * self.gap_us + sum(start for start, _ in added_gaps) * self.gap_context_us
        return max(self.floor_us, whole_us) - rest - moved_us - gaps_us - self.request_us

    def pass_with_gaps_us(self, computed: Sequence[Span]) -> float:
        """The time of a pass over these spans alone."""
        return self._with_gaps_us(sum(end - start for start, end in computed), num_reads(computed))

    def _with_gaps_us(self, num_tokens: int, reads: int) -> float:
        us = max(self.computed_token_us, self.gap_token_us) * num_tokens + self.gap_token_context_us * reads
        return max(self.floor_us, self.gap_floor_us, us)

    def shortest_run(self, num_tokens: int) -> int | None:
        """The length of the shortest run worth splicing in a prompt of `num_tokens`, if it adds a gap at its end.

        `None` if no run is.
        """

        def saves(num_spliced: int) -> bool:
            gaps = [(num_spliced, num_tokens), (num_tokens, num_tokens)]
            return self.request_saves(gaps, [(0, num_spliced)]) > 0

        def rest_us(computed: int) -> float:
            reads = num_reads([(num_tokens - computed, num_tokens)])
            return max(self.computed_token_us, self.gap_token_us) * computed + self.gap_token_context_us * reads

        # A longer run saves more until its pass is the shortest possible.
        floor_us = max(self.floor_us, self.gap_floor_us)
        fewest = bisect_right(range(num_tokens + 1), floor_us, key=rest_us) - 1 if self.computed_token_us > 0 else 0
        longest = max(1, num_tokens - max(1, fewest))
        if not saves(longest):
            return None
        return bisect_left(range(1, longest + 1), True, key=saves) + 1


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one request."""

    policy: ReusePolicy | None = None
    """The index's own policy if left out."""
    max_gaps: Annotated[int | None, Range(1, 1 << 40)] = None
    """Most gaps; runs that adjoin leave none between them."""
    max_runs: Annotated[int | None, Range(0, 1 << 40)] = None
    """Most runs."""
    compute_from: Annotated[int | None, Range(0, 1 << 40)] = None
    """Every token from this position on is computed: where input logprobs are wanted."""
    cost: CostModel | None = None
    num_before: Annotated[int, Range(0, 1 << 40)] = 0
    """Tokens that other requests compute in the same pass."""
    reads_before: Annotated[int, Range(0, 1 << 80)] = 0
    """Their `num_reads`."""

    def __post_init__(self) -> None:
        check(self)


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A span of the prompt that is spliced from one donor.

    The `seam_len` tokens before `target_start`, its seam, equal the donor's too, but are computed.
    """

    target_start: int
    target_end: int
    donor_start: int
    donor: Path
    seam_len: int
    context: Context = Context.SAME
    is_other: bool = False
    """Whether the rest of its context, beside changed fields, is another text."""
    generation: int = 0
    """Changed fields that the spliced rows depend on; fields that no text names do not count."""
    is_conditional: bool = False
    """Whether it is spliced only if a second pass may compute it: the prompt has reordered its text."""

    @property
    def donor_end(self) -> int:
        """End of the donor's span; `donor` is at least that long."""
        return self.donor_start + self.target_end - self.target_start

    @property
    def num_tokens(self) -> int:
        """Tokens spliced."""
        return self.target_end - self.target_start

    @property
    def shift(self) -> int:
        """Target position less donor position."""
        return self.target_start - self.donor_start

    def part(self, start: int, end: int) -> Run:
        """The run's tokens `[start, end)` of the prompt; what is left out in front of them is seam."""
        if (start, end) == (self.target_start, self.target_end):
            return self
        return msgspec.structs.replace(
            self,
            target_start=start,
            target_end=end,
            donor_start=start - self.shift,
            seam_len=self.seam_len + start - self.target_start,
        )


class Choice(NamedTuple):
    """A text that a second pass may compute, with its seam: tokens `[start, end)` of the prompt."""

    start: int
    end: int
    num_spliced: int
    """Its tokens that are spliced."""


def choices_of(runs: Sequence[Run], guarded: Sequence[Span]) -> list[Choice]:
    """The choices of a plan with these runs, in order.

    Each begins with a conditional run, and has the runs that follow it without a seam, or from which the guard has cut
    it off: they are one text.
    """
    choices, last = list[Choice](), None
    for run in runs:
        if last is not None and _goes_on(last, run, guarded):
            first = choices[-1]
            choices[-1] = Choice(first.start, run.target_end, first.num_spliced + run.num_tokens)
        elif run.is_conditional:
            choices.append(Choice(run.target_start - run.seam_len, run.target_end, run.num_tokens))
        else:
            last = None
            continue
        last = run
    return choices


def _goes_on(last: Run, run: Run, guarded: Sequence[Span]) -> bool:
    if run.target_start == last.target_end:
        return True
    is_same = run.donor is last.donor and run.shift == last.shift
    return is_same and any(last.target_end <= start and end <= run.target_start for start, end in guarded)


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How `[prefix_len, end)` of a prompt is served: runs are spliced, everything between them is computed.

    [0, prefix_len)  the exact prefix, owned by the tree
    runs             in order, disjoint, inside [prefix_len, end - 1)
    gaps             the rest of [prefix_len, end); its last token is always in a gap
    """

    prefix_len: int
    end: int
    runs: tuple[Run, ...] = ()
    dropped: dict[DropReason, int] = {}
    changed_fields: tuple[Span, ...] = ()
    """Fields that have another value in the context of a run's donor; empty spans for removed values."""
    guarded: tuple[Span, ...] = ()
    """Spans that are computed because of a changed field instead of spliced."""

    @property
    def gaps(self) -> tuple[Span, ...]:
        """The maximal spans of `[prefix_len, end)` that no run covers, in order."""
        starts = (self.prefix_len, *(run.target_end for run in self.runs))
        ends = (*(run.target_start for run in self.runs), self.end)
        return tuple((start, end) for start, end in zip(starts, ends, strict=True) if start < end)

    @property
    def num_spliced(self) -> int:
        """Spliced tokens."""
        return sum(run.num_tokens for run in self.runs)

    @property
    def conditional(self) -> tuple[Run, ...]:
        """The runs that are spliced because a second pass may compute them."""
        return tuple(run for run in self.runs if run.is_conditional)

    def without_conditional(self) -> Plan:
        """The plan that computes these runs, and those that follow one of them without a seam."""
        runs, computed_to = list[Run](), None
        for run in self.runs:
            if run.is_conditional or run.target_start == computed_to:
                computed_to = run.target_end
            else:
                runs.append(run)
        return msgspec.structs.replace(self, runs=tuple(runs))

    @property
    def choices(self) -> list[Choice]:
        """The texts of which a second pass computes one: that which the prompt's end attends to most."""
        return choices_of(self.runs, self.guarded)

    @property
    def most_again(self) -> tuple[Span, ...]:
        """The most that a second pass computes: the longest text with its seam, and the last gap."""
        choices = self.choices
        return (max(choices, key=lambda choice: choice.num_spliced)[:2], self.gaps[-1]) if choices else ()

    @property
    def num_charged(self) -> int:
        """Tokens of its longer pass: what a prefill budget is charged for it."""
        return max(self.num_computed, sum(end - start for start, end in self.most_again))

    @property
    def num_spared(self) -> int:
        """Tokens that are not charged."""
        return self.end - self.prefix_len - self.num_charged

    def after_second_pass(self) -> Plan:
        """The plan without the most that a second pass computes."""
        start, end = self.most_again[0] if self.most_again else (0, 0)
        return msgspec.structs.replace(
            self, runs=tuple(run for run in self.runs if not start <= run.target_start < end)
        )

    @property
    def num_behind_change(self) -> int:
        """Tokens spliced after a changed field."""
        return sum(run.num_tokens for run in self.runs if run.context is Context.CHANGED)

    @property
    def num_guarded(self) -> int:
        """Tokens computed because of a changed field."""
        return sum(end - start for start, end in self.guarded)

    @property
    def num_computed(self) -> int:
        """Computed tokens."""
        return self.end - self.prefix_len - self.num_spliced

    def saved_us(self, cost: CostModel, *, num_fetched: int, num_before: int = 0, reads_before: int = 0) -> float:
        """What `cost.request_saves` says of it."""
        runs = ((run.target_start, run.target_end) for run in self.runs)
        saved = cost.request_saves(
            self.gaps, runs, num_fetched=num_fetched, num_before=num_before, reads_before=reads_before
        )
        again = self.most_again
        return saved - cost.request_us - cost.gap_us - cost.pass_with_gaps_us(again) if again else saved

    def cut(self, budget: int, *, most: int | None = None, page_size: int = 1, whole: Sequence[Span] = ()) -> int:
        """The last position where a prefill chunk of at most `budget` computed tokens may end.

        Args:
            budget: computed tokens that are left; less than 1 counts as 1.
            most: tokens of the longest chunk, spliced ones included; no limit by default.
            page_size: inside the prompt a chunk ends on a multiple of this.
            whole: as in `PlanOptions`; a chunk does not end inside such a span if it is spliced.

        Returns:
            A position in `(prefix_len, end]`: `end` if everything fits, and at least one page, for progress.
        """
        longest = self.end if most is None else min(self.end, self.prefix_len + most)
        if self.num_computed <= budget and longest == self.end:
            return self.end
        at, left = self.prefix_len, max(budget, 1)
        for run in self.runs:
            gap_len = run.target_start - at
            if gap_len > left:
                break
            left -= gap_len
            at = run.target_end
        furthest = min(at + left, longest)
        aligned = furthest - furthest % page_size
        # The last token of a chunk is computed.
        while (start := whole_part(whole, self.prefix_len, aligned - 1)[1]) < aligned - 1 and any(
            run.target_start <= start < run.target_end for run in self.runs
        ):
            aligned = start - start % page_size
        return aligned if aligned > self.prefix_len else min(self.end, self.prefix_len + page_size)

    def since(self, start: int) -> Plan:
        """The part of the plan from position `start` on."""
        if start <= self.prefix_len:
            return self
        left = [run for run in self.runs if run.target_end > start]
        runs = tuple(run.part(max(start, run.target_start), run.target_end) for run in left)
        guarded = tuple(intersect_spans(self.guarded, start, self.end))
        return msgspec.structs.replace(self, prefix_len=min(start, self.end), runs=runs, guarded=guarded)

    def clip(self, end: int, whole: Sequence[Span] = ()) -> Plan:
        """The plan cut at `end`, whose last token is computed; no run ends inside a span of `whole` (`PlanOptions`)."""
        runs = []
        for run in self.runs:
            _, stop = whole_part(whole, run.target_start, min(run.target_end, end - 1))
            if stop > run.target_start:
                runs.append(run.part(run.target_start, stop))
        return msgspec.structs.replace(
            self, end=end, runs=tuple(runs), guarded=tuple(intersect_spans(self.guarded, self.prefix_len, end))
        )
