"""What an unlimited cache would have done with one recorded call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pic_traces.encode.encoded import EncodedCall, Tokens

from sglang_pic.core import Context, Span

EXPECTED_LEN = 4096
"""Most tokens of `Outcome.expected`: enough to show a break and to measure what was inserted or removed."""


class CallRef(NamedTuple):
    """One call of the input."""

    number: int
    """Counts calls from 0 over all files."""
    file: str
    session: str
    index: int  # type: ignore[assignment]  # hides `tuple.index`, which nobody needs of a call
    """Counts calls from 0 in the session."""

    def is_same_session(self, other: CallRef) -> bool:
        """Whether both calls belong to one session."""
        return (self.file, self.session) == (other.file, other.session)


class RunSpan(NamedTuple):
    """A run of the plan: `[start, end)` of the prompt, which `donor` computed `shift` tokens earlier."""

    start: int
    end: int
    shift: int
    seam_len: int
    """Tokens directly before `start` that also equal the donor's, but are computed."""
    donor: CallRef
    context: Context = Context.SAME
    """How the text before the donor's rows differs from the text before the run."""

    @property
    def is_behind_change(self) -> bool:
        """Whether a field has another value before the run than before the donor's rows."""
        return self.context is Context.CHANGED


class ChangedField(NamedTuple):
    """A field of the prompt, at `[start, end)`, that has another value than it had before a run's donor."""

    start: int
    end: int
    """Equals `start` where the value was removed."""
    old: Tokens
    """The value before."""


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
    """The latest of the earlier calls whose paths (prompt and answer) share the longest prefix with this prompt; None
    if no path begins with the prompt's first token."""
    expected: Tokens
    """How the neighbor's path goes on from `prefix_len`, at most `EXPECTED_LEN` tokens. Empty if the path ends there:
    then nothing broke, and the prompt continues it."""
    num_inherited: int = 0
    """Tokens of the prefix from the first one on whose row is spliced, or was computed behind spliced rows."""
    changed_fields: tuple[ChangedField, ...] = ()
    """In order."""
    guarded: tuple[Span, ...] = ()
    """What is computed because of a changed field and would be spliced otherwise; in order, disjoint, outside the
    runs."""
    is_aged: bool = False
    """Whether donors were refused because more changes are behind their rows than `max_generation` allows."""
    recorded_len: int | None = None
    """Length of the prompt as the log recorded it; None where it did not."""

    @property
    def num_chunk_hit(self) -> int:
        """Tokens that runs cover."""
        return sum(run.end - run.start for run in self.runs)

    @property
    def num_behind_change(self) -> int:
        """Tokens that runs behind a changed field cover."""
        return sum(run.end - run.start for run in self.runs if run.is_behind_change)

    @property
    def num_guarded(self) -> int:
        """Tokens that are computed because of a changed field."""
        return sum(end - start for start, end in self.guarded)

    @property
    def num_repeated(self) -> int:
        """Tokens behind the prefix that were there before: those of runs, and those computed because of a change."""
        return self.num_chunk_hit + self.num_guarded

    @property
    def stored_len(self) -> int:
        """Leading tokens of the prompt that begin an earlier path: `prefix_len`, or all of them."""
        tokens = self.encoded.tokens
        is_whole = len(tokens) == self.prefix_len + 1 and len(self.expected) > 0 and self.expected[0] == tokens[-1]
        return self.prefix_len + is_whole
