"""Adds outcomes up, by file and in all.

Owns the counts and their JSON form. Must not know how they were come by, nor how they are shown.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from pic_traces.encode.encoded import Part

from sglang_pic.census.outcome import Outcome, RunSpan
from sglang_pic.census.windows import WINDOW_LEN, Repeated, WindowSearch

__all__ = ["Census", "Counts", "Detail", "FileCounts", "RunLengths", "Tally", "UpperBound"]


class RunLengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Percentiles of the tokens of a run (nearest rank)."""

    p10: int
    p50: int
    p90: int


class UpperBound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a search at every alignment finds."""

    window_len: int
    """Tokens of a window."""
    tokens: int
    """Prompt tokens outside the prefix that lie in a window seen before; it may begin in the prefix."""
    tokens_behind: int
    """Those of them that lie in such a window wholly behind the prefix."""


class Detail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What else is known."""

    is_complete: bool = True
    """False where the census was stopped inside the file; the counts are of the calls before that."""
    note: str | None = None
    tokenizer: str | None = None
    tokenizer_exact: bool | None = None
    run_lengths: RunLengths | None = None
    """None where there is no run."""
    chunk_tokens_same_session: int | None = None
    chunk_tokens_other_session: int | None = None
    chunk_tokens_by_role: dict[str, int] | None = None
    """Tokens of runs by the role of the message they stand in; `template` for what belongs to no message."""
    upper_bound: UpperBound | None = None
    """None where it was not asked for."""


class Counts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompt tokens by where they would come from; prefix + chunk + new = prompt.

    `chunk_tokens`, `new_tokens` and `runs` are None where the trace cannot tell.
    """

    sessions: int
    calls: int
    prompt_tokens: int
    prefix_tokens: int
    chunk_tokens: int | None
    new_tokens: int | None
    runs: int | None
    detail: Detail = Detail()

    @property
    def recovered(self) -> float | None:
        """Share of the prefix cache's misses that chunks serve; None where there are none, or nobody can tell."""
        misses = (self.chunk_tokens or 0) + (self.new_tokens or 0)
        return None if self.chunk_tokens is None or not misses else self.chunk_tokens / misses

    def of_file(self, file: str) -> FileCounts:
        """The same under a file's name."""
        return FileCounts(file=file, **msgspec.structs.asdict(self))


class FileCounts(Counts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The counts of one file, or of whatever else was named on the command line."""

    file: str


class Census(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result: what `--json` prints."""

    files: list[FileCounts]
    total: Counts

    def to_json(self) -> str:
        """Indented JSON; the name of a file comes first, as a reader wants it."""
        files = [{"file": counts.file, **msgspec.to_builtins(counts)} for counts in self.files]
        text = msgspec.json.encode({"files": files, "total": self.total})
        return msgspec.json.format(text).decode()


@dataclass(slots=True)
class Tally:
    """Counts outcomes; grows with distinct run lengths and roles only.

    Args:
        search: looks windows up for the upper bound; None leaves the bound out. Tallies that share a cache share it.
    """

    search: WindowSearch | None = None
    is_complete: bool = False
    sessions: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    chunk_tokens: int = 0
    same_session_tokens: int = 0
    repeated: Repeated = field(default_factory=Repeated)
    run_lengths: Counter[int] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count one call."""
        tokens = outcome.encoded.tokens
        self.sessions += outcome.ref.index == 0
        self.calls += 1
        self.prompt_tokens += len(tokens)
        self.prefix_tokens += outcome.prefix_len
        self.chunk_tokens += outcome.num_chunk_hit
        if outcome.runs:
            parts = outcome.encoded.parts
            for run in outcome.runs:
                self._add_run(run, outcome, parts)
        if self.search is not None:
            repeated = self.search.observe(
                outcome.encoded.path, prompt_len=len(tokens), prefix_len=_stored_len(outcome)
            )
            self.repeated = self.repeated.plus(repeated)

    def merge(self, other: Tally) -> None:
        """Add what another one counted."""
        self.sessions += other.sessions
        self.calls += other.calls
        self.prompt_tokens += other.prompt_tokens
        self.prefix_tokens += other.prefix_tokens
        self.chunk_tokens += other.chunk_tokens
        self.same_session_tokens += other.same_session_tokens
        self.repeated = self.repeated.plus(other.repeated)
        self.run_lengths += other.run_lengths
        self.roles += other.roles

    def counts(self, *, tokenizer: str, tokenizer_exact: bool, note: str | None = None) -> Counts:
        """The counts as they stand."""
        return Counts(
            sessions=self.sessions,
            calls=self.calls,
            prompt_tokens=self.prompt_tokens,
            prefix_tokens=self.prefix_tokens,
            chunk_tokens=self.chunk_tokens,
            new_tokens=self.prompt_tokens - self.prefix_tokens - self.chunk_tokens,
            runs=self.run_lengths.total(),
            detail=Detail(
                is_complete=self.is_complete,
                note=note,
                tokenizer=tokenizer,
                tokenizer_exact=tokenizer_exact,
                run_lengths=_percentiles(self.run_lengths),
                chunk_tokens_same_session=self.same_session_tokens,
                chunk_tokens_other_session=self.chunk_tokens - self.same_session_tokens,
                chunk_tokens_by_role=dict(self.roles.most_common()),
                upper_bound=self._upper_bound(),
            ),
        )

    def _add_run(self, run: RunSpan, outcome: Outcome, parts: Sequence[Part]) -> None:
        length = run.end - run.start
        self.run_lengths[length] += 1
        if (run.donor.file, run.donor.session) == (outcome.ref.file, outcome.ref.session):
            self.same_session_tokens += length
        at = max(0, bisect_right(parts, run.start, key=lambda part: part.start) - 1)
        while at < len(parts) and parts[at].start < run.end:
            self.roles[parts[at].role] += min(parts[at].end, run.end) - max(parts[at].start, run.start)
            at += 1

    def _upper_bound(self) -> UpperBound | None:
        if self.search is None:
            return None
        return UpperBound(window_len=WINDOW_LEN, tokens=self.repeated.num, tokens_behind=self.repeated.num_behind)


def _stored_len(outcome: Outcome) -> int:
    """How much of the prompt begins an earlier path: `prefix_len`, or all of it."""
    tokens, expected = outcome.encoded.tokens, outcome.expected
    is_whole = len(tokens) == outcome.prefix_len + 1 and len(expected) > 0 and expected[0] == tokens[-1]
    return outcome.prefix_len + is_whole


def _percentiles(lengths: Counter[int]) -> RunLengths | None:
    total = lengths.total()
    if not total:
        return None
    found = []
    ordered = sorted(lengths.items())
    for percent in (10, 50, 90):
        rank = -(-percent * total // 100)
        passed = 0
        for length, count in ordered:
            passed += count
            if passed >= rank:
                found.append(length)
                break
    return RunLengths(p10=found[0], p50=found[1], p90=found[2])
