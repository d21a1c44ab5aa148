"""What a soak found: the one line of JSON that it ends with."""

from __future__ import annotations

import msgspec

from pic_bench.frame import Result


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults made on purpose before the load, which the checkers must find."""

    stale_rows: int
    """Of a request whose donors were unlocked before they were copied."""
    mismatches: int
    """Of `num_mismatches` prompts with one other token in the middle, those whose answers were told from the right."""
    num_mismatches: int


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resident memory of the scheduler in MiB, each the median of a minute (of a tenth of the run, if it is short)."""

    after_warm_up: float
    """After 5 minutes, or after half of the run, if it is short."""
    at_end: float


class Soak(Result, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The counts of a run. Those from `mismatches` to `failures` must be 0. Earlier runs counted more."""

    model: str
    seed: int
    page_size: int
    pool_tokens: int
    seconds: float
    """From the first request to the last idle point."""
    sessions: int
    requests: int
    outcomes: dict[str, int]
    """Requests by how they ended: answered, ended by a fault that was injected, or failed."""
    faults: dict[str, int]
    """By kind, as injected; a request may be answered before its fault meets it."""
    idle_points: int
    flushes: int
    tokens: dict[str, int]
    """Prompt tokens of admitted requests, by source."""
    evicted_tokens: int
    retractions: int
    fallbacks: dict[str, int]
    """Runs that were not spliced, by why."""
    audited: int
    spliced_rows_checked: int
    read_rows_checked: int
    compared: int
    """Answers of `off` requests that a stock server gave, too."""
    mismatches: int
    leaks: int
    stale_rows: int
    failures: int
    """Requests that ended in a way that no fault explains, and errors in the server's log."""
    what: list[str]
    """The first of what was not 0, in words."""
    memory: Memory
    control: Control | None

    @property
    def is_clean(self) -> bool:
        """Whether all that must be 0 is, and the checkers found what was made wrong on purpose."""
        can_find = self.control is None or (
            self.control.stale_rows > 0 and self.control.mismatches == self.control.num_mismatches
        )
        return can_find and not (self.mismatches or self.leaks or self.stale_rows or self.failures)
