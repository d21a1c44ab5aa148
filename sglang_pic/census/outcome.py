"""What an unlimited cache would have done with one recorded call.

Owns the types that the simulation yields and that census and explain read. Must not know files, tables or pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pic_traces.encode.encoded import EncodedCall, Tokens

__all__ = ["EXPECTED_LEN", "CallRef", "Outcome", "RunSpan"]

EXPECTED_LEN = 4096
"""Most tokens of `Outcome.expected`: enough to show a break and to measure what was put in or left out."""


class CallRef(NamedTuple):
    """One call of the input."""

    number: int
    """Counts calls from 0 over all files."""
    file: str
    session: str
    index: int  # type: ignore[assignment]  # hides `tuple.index`, which nobody asks of a call
    """Counts calls from 0 in its session."""


class RunSpan(NamedTuple):
    """A run of the plan: `[start, end)` of the prompt, spliced from what `donor` computed `shift` tokens earlier."""

    start: int
    end: int
    shift: int
    seam_len: int
    """Tokens directly before `start` that equal the donor's too, but are computed."""
    donor: CallRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One call, served.

    [0, prefix_len)  the exact prefix
    runs             in order, disjoint, behind the prefix
    the rest         computed
    """

    ref: CallRef
    agent: str | None
    encoded: EncodedCall
    prefix_len: int
    """At most the prompt's length less one: the last token is always computed."""
    runs: tuple[RunSpan, ...]
    neighbor: CallRef | None
    """Of the earlier calls whose paths (prompt and answer) agree longest with the prompt the latest; None where the
    first token differs from everything before."""
    expected: Tokens
    """How the neighbour's path goes on from `prefix_len`, at most `EXPECTED_LEN` tokens; empty where it ends there,
    which means that nothing broke: the prompt continues it."""

    @property
    def num_chunk_hit(self) -> int:
        """Tokens that runs cover."""
        return sum(run.end - run.start for run in self.runs)
