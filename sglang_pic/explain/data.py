"""What the page is told: every call in a few numbers and quotations, as compact JSON.

Owns the payload's schema (the page's script reads the same fields by position) and its bounds. Must not know HTML.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from sglang_pic.census.outcome import Outcome
from sglang_pic.explain.cause import Cause
from sglang_pic.explain.causes import Break, Diagnoser
from sglang_pic.explain.groups import Grouping
from sglang_pic.explain.lexicon import Lexicon
from sglang_pic.explain.snippets import SnippetPool, quote

__all__ = ["BreakRow", "CallRow", "GroupRow", "Payload", "PayloadBuilder", "SessionRow", "Totals"]

SCHEMA_VERSION = 1
_SPAN_CHARS = 240
# A call of many spans gets shorter quotations, and its shortest spans none.
_MIN_SPAN_CHARS = 60
_MIN_CALL_CHARS, _MAX_CALL_CHARS = 600, 6_000
# Of all quotations, in UTF-8. Deflated and in base64 they add a fifth to a half of that to the page.
_MAX_BYTES = 32_000_000


class SessionRow(msgspec.Struct, frozen=True, array_like=True):
    """A session of a file."""

    file: int
    name: str


class BreakRow(msgspec.Struct, frozen=True, array_like=True):
    """A break; texts are numbers of the pool."""

    group: int
    at: int
    old_len: int | None
    new_len: int | None
    before: int
    old: int
    new: int
    after: int
    neighbor: int


class CallRow(msgspec.Struct, frozen=True, array_like=True):
    """A call."""

    session: int
    index: int
    agent: int
    """Number of the agent's name; 0 is the main one."""
    prompt_len: int
    answer_len: int
    prefix_len: int
    runs: list[int]
    """Five numbers a run: start, end, shift, seam_len, number of the donor call."""
    texts: list[int]
    """Numbers of the pool: the prefix, then every gap and run in order."""
    found: BreakRow | None


class GroupRow(msgspec.Struct, frozen=True, array_like=True):
    """Breaks of one cause at places that look alike."""

    cause: str
    signature: str
    num_calls: int
    num_lost: int
    num_behind: int
    worst_call: int


class CauseRow(msgspec.Struct, frozen=True, array_like=True):
    """A cause in plain words."""

    key: str
    label: str
    advice: str


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    schema_version: int
    encoder: str
    is_exact: bool
    files: list[str]
    sessions: list[SessionRow]
    agents: list[str]
    causes: list[CauseRow]
    groups: list[GroupRow]
    calls: list[CallRow]
    texts: list[str]
    num_texts_left_out: int


@dataclass(slots=True)
class Totals:
    """Sums over all calls."""

    num_calls: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    chunk_tokens: int = 0
    num_appending: int = 0
    """Calls that continue an earlier path, or have none to continue, and yet have chunk hits."""
    appended_tokens: int = 0
    """Their chunk hits: repeats in text that was appended, for which no break is to blame."""

    @property
    def new_tokens(self) -> int:
        """Tokens that no cache has."""
        return self.prompt_tokens - self.prefix_tokens - self.chunk_tokens


@dataclass(slots=True)
class PayloadBuilder:
    """Takes outcomes one by one, in order, and keeps of each what the page shows.

    Args:
        num_calls: how many will come, which the quotations are shared out to.
        max_bytes: of all quotations together; beyond it calls are shown without text.
    """

    num_calls: int
    max_bytes: int = _MAX_BYTES
    totals: Totals = field(default_factory=Totals)
    grouping: Grouping = field(default_factory=Grouping)
    _lexicon: Lexicon = field(default_factory=Lexicon)
    _diagnoser: Diagnoser = field(init=False)
    _pool: SnippetPool = field(init=False)
    _files: dict[str, int] = field(default_factory=dict)
    _sessions: dict[tuple[int, str], int] = field(default_factory=dict)
    _agents: dict[str, int] = field(default_factory=lambda: {"": 0})
    _calls: list[CallRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._diagnoser = Diagnoser(self._lexicon.decode)
        self._pool = SnippetPool(self.max_bytes)

    def add(self, outcome: Outcome) -> None:
        """Take one call; their numbers count from 0."""
        assert outcome.ref.number == len(self._calls), "calls come in order"
        found = self._diagnoser.diagnose(outcome)
        self._lexicon.learn(outcome.encoded, outcome.prefix_len)
        self._calls.append(self._row(outcome, found))
        totals = self.totals
        totals.num_calls += 1
        totals.prompt_tokens += len(outcome.encoded.tokens)
        totals.prefix_tokens += outcome.prefix_len
        totals.chunk_tokens += outcome.num_chunk_hit
        if found is None and outcome.num_chunk_hit:
            totals.num_appending += 1
            totals.appended_tokens += outcome.num_chunk_hit

    def build(self, encoder: str, *, is_exact: bool) -> Payload:
        """Everything taken so far.

        Args:
            encoder: what the token ids are of.
            is_exact: whether they are a model's own.
        """
        return Payload(
            schema_version=SCHEMA_VERSION,
            encoder=encoder,
            is_exact=is_exact,
            files=list(self._files),
            sessions=[SessionRow(file, name) for file, name in self._sessions],
            agents=list(self._agents),
            causes=[CauseRow(cause.value, cause.label, cause.advice) for cause in Cause],
            groups=[
                GroupRow(g.cause.value, g.signature, g.num_calls, g.num_lost, g.num_behind, g.worst_call)
                for g in self.grouping.in_order()
            ],
            calls=self._calls,
            texts=self._pool.texts,
            num_texts_left_out=self._pool.num_refused,
        )

    def _row(self, outcome: Outcome, found: Break | None) -> CallRow:
        ref, encoded = outcome.ref, outcome.encoded
        file = self._files.setdefault(ref.file, len(self._files))
        return CallRow(
            session=self._sessions.setdefault((file, ref.session), len(self._sessions)),
            index=ref.index,
            agent=self._agents.setdefault(outcome.agent or "", len(self._agents)),
            prompt_len=len(encoded.tokens),
            answer_len=len(encoded.path) - len(encoded.tokens),
            prefix_len=outcome.prefix_len,
            runs=[
                value
                for run in outcome.runs
                for value in (run.start, run.end, run.shift, run.seam_len, run.donor.number)
            ],
            texts=self._quote(outcome),
            found=None if found is None else self._break_row(outcome, found),
        )

    def _break_row(self, outcome: Outcome, found: Break) -> BreakRow:
        group = self.grouping.add(found, outcome.ref.number, outcome.agent)
        add = self._pool.add
        return BreakRow(
            group.number,
            found.at,
            found.old_len,
            found.new_len,
            add(found.before),
            add(found.old),
            add(found.new),
            add(found.after),
            found.neighbor.number,
        )

    def _quote(self, outcome: Outcome) -> list[int]:
        spans = list(_spans(outcome))
        call_chars = max(_MIN_CALL_CHARS, min(_MAX_CALL_CHARS, self.max_bytes // max(1, self.num_calls)))
        most = max(_MIN_SPAN_CHARS, min(_SPAN_CHARS, call_chars // len(spans)))
        num_quoted = call_chars // most
        quoted = set(range(len(spans)))
        if len(spans) > num_quoted:
            # Stable: of equally short spans the later ones go.
            quoted = set(sorted(quoted, key=lambda number: spans[number][0] - spans[number][1])[:num_quoted])
        return [
            self._pool.add(quote(outcome.encoded.text, start, end, most)) if number in quoted and end > start else 0
            for number, (start, end) in enumerate(spans)
        ]


def _spans(outcome: Outcome) -> Iterable[tuple[int, int]]:
    """The prefix, then every gap and run in order. NOTE: the page's script walks the runs in the same way."""
    yield 0, outcome.prefix_len
    at = outcome.prefix_len
    for run in outcome.runs:
        if run.start > at:
            yield at, run.start
        yield run.start, run.end
        at = run.end
    if at < len(outcome.encoded.tokens):
        yield at, len(outcome.encoded.tokens)
