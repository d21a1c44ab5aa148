"""The result of one recorded call in an unlimited cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pic_traces.encode.encoded import EncodedCall, Tokens

from sglang_pic.core import Context, Span

EXPECTED_LEN = 4096
"""Most tokens of `Outcome.expected`: enough to show a break and to measure an insertion or a removal."""


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
    """A run of the plan: `[start, end)` of the prompt, spliced from the call `donor`, there `shift` tokens earlier."""

    start: int
    end: int
    shift: int
    seam_len: int
    """Tokens directly before `start` that equal the donor's and are computed (the seam)."""
    donor: CallRef
    context: Context = Context.SAME
    """How the text before the donor's rows differs from the text before the run."""


class ChangedField(NamedTuple):
    """A field at tokens `[start, end)` of the prompt whose value differs from that before a run's donor."""

    start: int
    end: int
    """Equals `start` if the value was removed."""
    old: Tokens
    """The old value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One served call.

    [0, prefix_len)  the exact prefix
    runs             in order, disjoint, after the prefix
    the rest         computed
    """

    ref: CallRef
    agent: str | None
    encoded: EncodedCall
    prefix_len: int
    """At most the prompt's length minus one, because the last token is always computed."""
    runs: tuple[RunSpan, ...]
    neighbor: CallRef | None
    """The latest of the earlier calls whose paths (prompt and answer) share the longest prefix with this prompt; None
    if no path begins with the prompt's first token."""
    expected: Tokens
    """The neighbor's next tokens after `prefix_len`, at most `EXPECTED_LEN`. Empty if its path ends there: then the
    prompt continues it, and nothing broke."""
    num_inherited: int = 0
    """Tokens of the prefix from the first approximate row on: spliced, or computed after spliced rows."""
    changed_fields: tuple[ChangedField, ...] = ()
    """In order."""
    guarded: tuple[Span, ...] = ()
    """Spans that are computed only because of a changed field; in order, disjoint, outside the runs."""
    is_aged: bool = False
    """Whether donors were refused because their rows depend on more changes than `max_generation` allows."""
    recorded_len: int | None = None
    """The prompt's length as recorded in the log; None if it is not recorded."""

    @property
    def num_chunk_hit(self) -> int:
        """Spliced tokens."""
        return sum(run.end - run.start for run in self.runs)

    @property
    def num_behind_change(self) -> int:
        """Tokens spliced after a changed field."""
        return sum(run.end - run.start for run in self.runs if run.context is Context.CHANGED)

    @property
    def num_guarded(self) -> int:
        """Tokens computed because of a changed field."""
        return sum(end - start for start, end in self.guarded)

    @property
    def num_repeated(self) -> int:
        """Repeated tokens after the prefix: spliced ones, and those computed because of a changed field."""
        return self.num_chunk_hit + self.num_guarded

    @property
    def stored_len(self) -> int:
        """Leading tokens of the prompt that are stored: `prefix_len`, or the whole prompt."""
        tokens = self.encoded.tokens
        is_whole = len(tokens) == self.prefix_len + 1 and len(self.expected) > 0 and self.expected[0] == tokens[-1]
        return self.prefix_len + is_whole
