"""The counts of a census, as structs that `--json` prints."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from pic_traces.encode.encoded import Encoder

from sglang_pic.census.outcome import Outcome
from sglang_pic.census.pools import Pools
from sglang_pic.census.windows import WINDOW_LEN, Repeated

_SAME_EXACT, _SAME_WORDS = 0.03, 0.12
"""Differences between counted and recorded tokens that are not worth a word. Words: the stand-in's own error."""


class UpperBound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Repeated tokens outside the prefix that a search at every alignment finds."""

    window_len: int
    """Tokens per window."""
    tokens: int
    """Prompt tokens that lie in a window seen before; the window may begin in the prefix."""
    tokens_behind: int
    """Prompt tokens in such a window that lies entirely after the prefix."""


class HybridCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompt tokens that a hybrid model's prefix cache serves."""

    state_tokens: int
    """With the states that SGLang keeps; a model without state is served `prefix_tokens`."""
    placed_tokens: int
    """With states where `Checkpoints` has them kept, in the place of others."""


class ChangedFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts of text after changed fields: fields with another value than before a run's donor."""

    calls: int
    """Calls with such a field."""
    fields: int
    chunk_tokens: int
    """Tokens spliced after such a field."""
    guarded_tokens: int
    """Tokens computed only because of such a field; part of the new tokens."""
    aged_calls: int = 0
    """Calls with donors that were refused because their rows depend on more changes than `max_generation` allows."""


class Detail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Further counts; None is unknown, or not asked for."""

    is_complete: bool = True
    """False if the census stopped in the middle of the file; the counts cover the calls until then."""
    note: str | None = None
    recorded_tokens: int | None = None
    """Prompt tokens as recorded in the log, of the calls that have such a record; None if no call has."""
    compared_tokens: int | None = None
    """Prompt tokens of the same calls as counted here."""
    tokenizer: str
    tokenizer_exact: bool
    chunk_tokens_same_session: int
    chunk_tokens_other_session: int
    changed_fields: ChangedFields
    inherited_calls: int
    """Calls without a run whose exact prefix has approximate rows: spliced for earlier calls, or computed after such
    rows."""
    upper_bound: UpperBound | None = None
    """None without `--upper-bound`."""
    hybrid: HybridCounts | None = None
    """None without `--hybrid`."""


class Counts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompt tokens by their source; prefix + chunk + new = prompt."""

    sessions: int
    calls: int
    prompt_tokens: int
    prefix_tokens: int
    chunk_tokens: int
    new_tokens: int
    runs: int
    detail: Detail

    @property
    def recovered(self) -> float | None:
        """Share of the prefix cache's misses that are spliced; None without misses."""
        misses = self.chunk_tokens + self.new_tokens
        return self.chunk_tokens / misses if misses else None


class FileCounts(Counts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The counts of one FILE of the command line."""

    file: str


class Census(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result, as `--json` prints it."""

    files: list[FileCounts]
    total: Counts
    pools: Pools | None = None
    """None without `--pool`."""

    def to_json(self) -> str:
        """Indented JSON in ASCII, because names of files need not be UTF-8; a file's name is before its counts."""
        files = [{"file": counts.file, **msgspec.to_builtins(counts)} for counts in self.files]
        pools = {} if self.pools is None else {"pools": msgspec.to_builtins(self.pools)}
        return json.dumps({"files": files, "total": msgspec.to_builtins(self.total), **pools}, indent=2)


@dataclass(slots=True)
class Tally:
    """Adds up outcomes. Memory grows only with sessions."""

    is_complete: bool = False
    calls: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    chunk_tokens: int = 0
    runs: int = 0
    same_session_tokens: int = 0
    changed_calls: int = 0
    changed_fields: int = 0
    behind_change_tokens: int = 0
    guarded_tokens: int = 0
    aged_calls: int = 0
    inherited_calls: int = 0
    recorded_calls: int = 0
    recorded_tokens: int = 0
    compared_tokens: int = 0
    """As counted, of the calls whose length is recorded in the log."""
    repeated: Counter[str] = field(default_factory=Counter)
    """By the names of `UpperBound`; empty without a search."""
    hybrid: Counter[str] = field(default_factory=Counter)
    """By the names of `HybridCounts`; empty for other models."""
    _sessions: set[tuple[str, str]] = field(default_factory=set)

    @property
    def sessions(self) -> int:
        """Sessions with a counted call; the template may refuse the first one of a session."""
        return len(self._sessions)

    def add(self, outcome: Outcome, repeated: Repeated | None = None, hybrid: Mapping[str, int] | None = None) -> None:
        """Count one call.

        Args:
            outcome: the call.
            repeated: the repeated tokens that the upper bound found; None if there was no search.
            hybrid: the hits of a hybrid model's server, by the names of `HybridCounts`; None for other models.
        """
        self._sessions.add((outcome.ref.file, outcome.ref.session))
        self.calls += 1
        self.prompt_tokens += len(outcome.encoded.tokens)
        self.prefix_tokens += outcome.prefix_len
        self.chunk_tokens += outcome.num_chunk_hit
        self.changed_calls += bool(outcome.changed_fields)
        self.changed_fields += len(outcome.changed_fields)
        self.behind_change_tokens += outcome.num_behind_change
        self.guarded_tokens += outcome.num_guarded
        self.aged_calls += outcome.is_aged
        self.inherited_calls += bool(outcome.num_inherited and not outcome.runs)
        if outcome.recorded_len is not None:
            self.recorded_calls += 1
            self.recorded_tokens += outcome.recorded_len
            self.compared_tokens += len(outcome.encoded.tokens)
        self.runs += len(outcome.runs)
        own = (run for run in outcome.runs if run.donor.is_same_session(outcome.ref))
        self.same_session_tokens += sum(run.end - run.start for run in own)
        if repeated is not None:
            self.repeated.update(tokens=repeated.num, tokens_behind=repeated.num_behind)
        self.hybrid.update(hybrid or {})

    def difference(self, *, is_exact: bool) -> str | None:
        """A warning if the counted tokens differ from the recorded ones; None if they agree.

        Args:
            is_exact: whether a model's own tokens were counted, not words.
        """
        counted, recorded = self.compared_tokens, self.recorded_tokens
        if not recorded or abs(counted - recorded) <= recorded * (_SAME_EXACT if is_exact else _SAME_WORDS):
            return None
        cause = "another tokenizer or template served them" if is_exact else "words are not tokens: set --tokenizer"
        if counted < recorded:
            cause = f"the log lacks text that was sent, or {cause}"
        return (
            f"the log recorded {recorded:,} prompt tokens for {self.recorded_calls:,} calls, {counted:,} are counted "
            f"({counted / recorded - 1:+.0%}): {cause}"
        )

    def counts(self, encoder: Encoder, note: str | None = None) -> Counts:
        """The counts so far, of the encoder's tokens."""
        return Counts(
            sessions=self.sessions,
            calls=self.calls,
            prompt_tokens=self.prompt_tokens,
            prefix_tokens=self.prefix_tokens,
            chunk_tokens=self.chunk_tokens,
            new_tokens=self.prompt_tokens - self.prefix_tokens - self.chunk_tokens,
            runs=self.runs,
            detail=Detail(
                is_complete=self.is_complete,
                note=note,
                recorded_tokens=self.recorded_tokens or None,
                compared_tokens=self.compared_tokens or None,
                tokenizer=encoder.name,
                tokenizer_exact=encoder.is_exact,
                chunk_tokens_same_session=self.same_session_tokens,
                chunk_tokens_other_session=self.chunk_tokens - self.same_session_tokens,
                changed_fields=ChangedFields(
                    calls=self.changed_calls,
                    fields=self.changed_fields,
                    chunk_tokens=self.behind_change_tokens,
                    guarded_tokens=self.guarded_tokens,
                    aged_calls=self.aged_calls,
                ),
                inherited_calls=self.inherited_calls,
                upper_bound=UpperBound(window_len=WINDOW_LEN, **self.repeated) if self.repeated else None,
                hybrid=HybridCounts(**self.hybrid) if self.hybrid else None,
            ),
        )
