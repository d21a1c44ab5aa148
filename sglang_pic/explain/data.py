"""What the page's script reads: every call in a few numbers and quotations, as compact JSON of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
from pic_traces.source import short_name

from sglang_pic.census.outcome import ChangedField, Outcome, RunSpan
from sglang_pic.census.tally import Tally
from sglang_pic.core import intersect_spans
from sglang_pic.explain.diagnose import Break, Diagnoser
from sglang_pic.explain.groups import Group, Grouping
from sglang_pic.explain.snippets import SnippetPool, quote
from sglang_pic.explain.token_texts import TokenTexts

SCHEMA_VERSION = 4
_SPAN_CHARS = 240
# A call of many spans gets shorter quotations, and its shortest spans get none.
_MIN_SPAN_CHARS = 60
_MIN_CALL_CHARS, _MAX_CALL_CHARS = 600, 6_000
# Of a call with more changed fields, the others are marked without text.
_MAX_QUOTED_FIELDS = 6
_FIELD_CHARS = 120
_FIELD_CONTEXT_TOKENS = 24
# Of all quotations, in UTF-8. Deflated and in base64 they add a fifth to a half of that to the page.
_MAX_BYTES = 32_000_000


class Row(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """An object that the script reads by the same names, in camelCase. Texts are numbers in a list of texts."""


class SessionRow(Row, frozen=True):
    """A session of a file."""

    file: int
    name: str


class BreakRow(Row, frozen=True):
    """A break."""

    group: int
    at: int
    old_len: int | None
    new_len: int | None
    before: int
    old: int
    new: int
    after: int
    neighbor: int
    num_lost: int = 0


class SpanRow(Row, frozen=True):
    """Tokens `[start, end)` of a prompt: the prefix, a gap, or a run."""

    start: int
    end: int
    text: int = 0
    donor: int | None = None
    """The number of the donor call; None if this is no run."""
    shift: int = 0
    seam_len: int = 0
    is_behind_change: bool = False
    """Whether a field has another value before this run than before the donor's rows."""
    is_guarded: bool = False
    """Whether this gap is computed because of a changed field, and would be spliced otherwise."""


class FieldRow(Row, frozen=True):
    """A field, at `[start, end)` of a prompt, that has another value than before a run's donor."""

    start: int
    end: int
    before: int = 0
    old: int = 0
    new: int = 0
    after: int = 0


class CallRow(Row, frozen=True):
    """A call."""

    session: int
    index: int
    agent: int
    """Number of the agent's name; 0 is the main one."""
    prompt_len: int
    answer_len: int
    prefix_len: int
    spans: list[SpanRow]
    """They tile the prompt."""
    found: BreakRow | None = None
    changed_fields: list[FieldRow] = []


class CauseRow(Row, frozen=True):
    """A cause that occurred, in plain words."""

    key: str
    label: str
    advice: str
    groups: list[int]
    """Worst first."""


@dataclass(slots=True)
class Figures(Tally):
    """What the page's head and the command print: the counts of the census, and repeats that no break caused."""

    appending_calls: int = 0
    """Calls that continue an earlier path, or have none to continue, and repeat text all the same."""
    appended_tokens: int = 0
    """The repeats in their appended text."""


class Payload(Row, frozen=True, kw_only=True):
    """All of it. Causes are ranked, worst first."""

    schema_version: int = SCHEMA_VERSION
    encoder: str
    is_exact: bool
    files: list[str]
    sessions: list[SessionRow]
    agents: list[str]
    causes: list[CauseRow]
    groups: list[Group]
    calls: list[CallRow]
    texts: list[str]
    num_texts_left_out: int


@dataclass(slots=True)
class PayloadBuilder:
    """Takes outcomes one by one, in order, and keeps of each what the page shows.

    Args:
        num_calls: how many will come; the room for quotations is divided among them.
        max_bytes: of all quotations together; once they are used up, calls are shown without text.
    """

    num_calls: int
    max_bytes: int = _MAX_BYTES
    grouping: Grouping = field(default_factory=Grouping)
    figures: Figures = field(default_factory=Figures)
    _texts: TokenTexts = field(default_factory=TokenTexts)
    _diagnoser: Diagnoser = field(init=False)
    _pool: SnippetPool = field(init=False)
    _files: dict[str, int] = field(default_factory=dict)
    _sessions: dict[tuple[int, str], int] = field(default_factory=dict)
    _agents: dict[str, int] = field(default_factory=lambda: {"": 0})
    _calls: list[CallRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._diagnoser = Diagnoser(self._texts.decode)
        self._pool = SnippetPool(self.max_bytes)

    def add(self, outcome: Outcome) -> None:
        """Take one call; calls are numbered from 0."""
        ref, encoded = outcome.ref, outcome.encoded
        assert ref.number == len(self._calls), "calls come in order"
        found = self._diagnoser.diagnose(outcome)
        self.figures.add(outcome)
        if found is None and outcome.num_repeated:
            self.figures.appending_calls += 1
            self.figures.appended_tokens += outcome.num_repeated
        self._texts.learn(encoded, outcome.prefix_len)
        file = self._files.setdefault(ref.file, len(self._files))
        self._calls.append(
            CallRow(
                session=self._sessions.setdefault((file, ref.session), len(self._sessions)),
                index=ref.index,
                agent=self._agents.setdefault(outcome.agent or "", len(self._agents)),
                prompt_len=len(encoded.tokens),
                answer_len=len(encoded.path) - len(encoded.tokens),
                prefix_len=outcome.prefix_len,
                spans=self._span_rows(outcome),
                found=None if found is None else self._break_row(outcome, found),
                changed_fields=[
                    *(self._field_row(outcome, changed) for changed in outcome.changed_fields[:_MAX_QUOTED_FIELDS]),
                    *(FieldRow(start=c.start, end=c.end) for c in outcome.changed_fields[_MAX_QUOTED_FIELDS:]),
                ],
            )
        )

    def build(self, encoder: str, *, is_exact: bool) -> Payload:
        """Everything taken so far.

        Args:
            encoder: what the token ids are of.
            is_exact: whether they are a model's own.
        """
        return Payload(
            encoder=encoder,
            is_exact=is_exact,
            files=[short_name(file) for file in self._files],
            sessions=[SessionRow(file=file, name=name) for file, name in self._sessions],
            agents=list(self._agents),
            causes=[
                CauseRow(
                    key=cause.value, label=cause.label, advice=cause.advice, groups=[group.number for group in groups]
                )
                for cause, groups in self.grouping.ranked_causes()
            ],
            groups=self.grouping.in_order(),
            calls=self._calls,
            texts=self._pool.texts,
            num_texts_left_out=self._pool.num_refused,
        )

    def _break_row(self, outcome: Outcome, found: Break) -> BreakRow:
        return BreakRow(
            group=self.grouping.add(found, outcome.ref.number, outcome.agent).number,
            at=found.at,
            old_len=found.old_len,
            new_len=found.new_len,
            before=self._pool.add(found.before),
            old=self._pool.add(found.old),
            new=self._pool.add(found.new),
            after=self._pool.add(found.after),
            neighbor=found.neighbor.number,
            num_lost=found.num_lost,
        )

    def _field_row(self, outcome: Outcome, changed: ChangedField) -> FieldRow:
        (start, end, old), text = changed, outcome.encoded.text
        old_text = quote(lambda first, last: self._texts.decode(old[first:last]), 0, len(old), _FIELD_CHARS)
        return FieldRow(
            start=start,
            end=end,
            before=self._pool.add(text(max(0, start - _FIELD_CONTEXT_TOKENS), start)),
            old=self._pool.add(old_text),
            new=self._pool.add(quote(text, start, end, _FIELD_CHARS)),
            after=self._pool.add(text(end, min(end + _FIELD_CONTEXT_TOKENS, len(outcome.encoded.tokens)))),
        )

    def _span_rows(self, outcome: Outcome) -> list[SpanRow]:
        spans = list(_spans(outcome))
        call_chars = max(_MIN_CALL_CHARS, min(_MAX_CALL_CHARS, self.max_bytes // max(1, self.num_calls)))
        most = max(_MIN_SPAN_CHARS, min(_SPAN_CHARS, call_chars // max(1, len(spans))))
        # Sorting is stable: of equally short spans the later ones get no quotation.
        by_length = sorted(range(len(spans)), key=lambda number: spans[number][0] - spans[number][1])
        quoted = set(by_length[: call_chars // most])
        return [
            SpanRow(
                start=start,
                end=end,
                text=self._pool.add(quote(outcome.encoded.text, start, end, most)) if number in quoted else 0,
                donor=run.donor.number if run else None,
                shift=run.shift if run else 0,
                seam_len=run.seam_len if run else 0,
                is_behind_change=bool(run and run.is_behind_change),
                is_guarded=bool(intersect_spans(outcome.guarded, start, end)),
            )
            for number, (start, end, run) in enumerate(spans)
        ]


def _spans(outcome: Outcome) -> Iterator[tuple[int, int, RunSpan | None]]:
    """The prefix, then every run and gap in order, gaps cut where a guarded span begins or ends; none is empty."""
    runs = {run.start: run for run in outcome.runs}
    cuts = {0, outcome.prefix_len, len(outcome.encoded.tokens)}
    cuts.update(*(run[:2] for run in outcome.runs), *outcome.guarded)
    for start, end in pairwise(sorted(cuts)):
        yield start, end, runs.get(start)
