"""What broke a call's prefix: the place, the text there before and after, and the cause.

The rules that tell causes apart were made on recorded sessions of coding agents, role-playing agents and customer
service; each rule names what it is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pic_traces.encode.encoded import Tokens

from sglang_pic.census.outcome import CallRef, Outcome
from sglang_pic.core import common_len
from sglang_pic.explain.cause import Cause
from sglang_pic.explain.fields import cause_of, first_value
from sglang_pic.explain.rejoin import Alignment, align, contained_share
from sglang_pic.explain.snippets import quote

# A changed field has at most this many tokens on either side; a longer change is a block.
_FIELD_TOKENS = 24
# Fields that change together (the time, the number of messages, the model) are in step again after at most this many.
_FIELDS_TOKENS = 96
# Windows that show that a block stands elsewhere. They are shorter than the windows of the alignment, because a number
# in the block may have changed ("19 turns left").
_MOVED_WINDOW = 8
_MOVED_SHARE = 0.6
# A prompt was compacted if it has at most this share of the agent's previous prompt, and that one was long.
_COMPACTED_SHARE = 0.7
_COMPACTED_FROM = 2_000
# A note that moves is at most this long; a longer text is a document.
_MAX_NOTE_TOKENS = 256
# A removed block may leave a stub ("[old tool result cleared]"); in another session a stub would be another text.
_STUB_SHARE = 0.25
_STUB_FROM = 16
_MAX_STUB_TOKENS = 24
_MAX_FOREIGN_STUB_TOKENS = 4
# Any two prompts of one template share fewer recoverable tokens than this.
_SHARED_TOKENS = 64
_SHARED_SHARE = 0.1
# Any two prompts of one template begin with about this many equal tokens.
_TEMPLATE_TOKENS = 8
_CONTEXT_TOKENS = 40
_QUOTE_CHARS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """Where and why one call left the path of its neighbor."""

    cause: Cause
    at: int
    """The first token that differs."""
    old_len: int | None
    """Tokens of the neighbor until both are in step again; None if they never are."""
    new_len: int | None
    """Tokens of the prompt until then."""
    num_lost: int
    """Tokens behind the break that were there before, and that a prefix cache computes again."""
    num_behind: int
    """All tokens behind the break."""
    before: str
    old: str
    new: str
    after: str
    neighbor: CallRef


class _Seen(NamedTuple):
    prompt_len: int
    agent: str | None


@dataclass(slots=True)
class Diagnoser:
    """Finds the cause of each call's break. Calls must come in order: earlier ones are remembered (O(1) a call).

    Args:
        decode: the text of token ids.
    """

    decode: Callable[[Tokens], str]
    _seen: dict[int, _Seen] = field(default_factory=dict)
    # The last prompt of each agent of the session that is running.
    _session: tuple[str, str] | None = None
    _last: dict[str | None, Outcome] = field(default_factory=dict)

    def diagnose(self, outcome: Outcome) -> Break | None:
        """What broke this call's prefix; None if the call continues an earlier path or has none to continue."""
        found = self._find(outcome)
        ref = outcome.ref
        if self._session != (ref.file, ref.session):
            self._session, self._last = (ref.file, ref.session), {}
        prompt_len = len(outcome.encoded.tokens)
        self._last[outcome.agent] = outcome
        self._seen[ref.number] = _Seen(prompt_len, outcome.agent)
        return found

    def _find(self, outcome: Outcome) -> Break | None:
        old = outcome.expected
        if len(old) == 0 or outcome.neighbor is None:
            return None
        rest = outcome.encoded.tokens[outcome.prefix_len :]
        # The last token is always computed, so a prompt that was there before "breaks" at a token that is equal.
        same = common_len(old, rest)
        at = outcome.prefix_len + same
        neighbor, ref = outcome.neighbor, outcome.ref
        place = _Place(
            outcome,
            at,
            old[same:],
            rest[same:],
            neighbor,
            self._seen.get(neighbor.number),
            neighbor.is_same_session(ref),
        )
        if same == len(rest):
            return self._describe(place, Cause.REWIND, None)
        if same == len(old):
            return None
        step = align(place.old, place.new) or _step_by_run(outcome, place)
        return self._describe(place, self._classify(place, step), step)

    def _classify(self, place: _Place, step: Alignment | None) -> Cause:
        found = self._value_of(place, step) or self._other_prompt(place, step) or _moved(place, step)
        if found is not None:
            return found
        if place.is_same_session and place.theirs is not None and place.at >= place.theirs.prompt_len:
            return Cause.ANSWER
        return _cause_of_lengths(step, _MAX_STUB_TOKENS if place.is_same_session else _MAX_FOREIGN_STUB_TOKENS)

    def _value_of(self, place: _Place, step: Alignment | None) -> Cause | None:
        """The cause if a value of a known kind changed: that says most, whichever agent made the call."""
        if step is None or max(step.old_len, step.new_len) > _FIELDS_TOKENS:
            return None
        if not place.is_same_session and not _shares(place):
            return None
        encoded, at = place.outcome.encoded, place.at
        resumes = at + step.new_len
        before = encoded.text(max(0, at - _CONTEXT_TOKENS), at)
        old, new = self.decode(place.old[: step.old_len]), encoded.text(at, resumes)
        if max(step.old_len, step.new_len) <= _FIELD_TOKENS:
            after = encoded.text(resumes, min(resumes + _CONTEXT_TOKENS, len(encoded.tokens)))
            found = cause_of(before, old, new, after)
            if found is not None:
                return found
        # Several fields in a row: the first of them ended the prefix.
        found = cause_of(before, first_value(old), first_value(new), "")
        return None if found is Cause.COUNT else found

    def _other_prompt(self, place: _Place, step: Alignment | None) -> Cause | None:
        """The cause if this is another prompt, not a later version of the neighbor's."""
        is_same_agent = place.theirs is None or place.theirs.agent == place.outcome.agent
        if is_same_agent and self._is_compacted(place, step):
            return Cause.COMPACTION
        # A break so near the front makes any prompt of the same template a neighbor.
        is_any = place.at < _TEMPLATE_TOKENS and (step is None or step.same_len < _SHARED_TOKENS)
        if not is_same_agent or is_any or not (place.is_same_session or _shares(place)):
            return Cause.AGENT if _shares(place) else Cause.NEW_TASK
        return None

    def _is_compacted(self, place: _Place, step: Alignment | None) -> bool:
        outcome = place.outcome
        if self._session != (outcome.ref.file, outcome.ref.session):
            return False
        last = self._last.get(outcome.agent)
        before = 0 if last is None else len(last.encoded.tokens)
        # An agent whose last prompt continued nothing keeps no history: some agents ask afresh every time.
        if last is None or before < _COMPACTED_FROM or last.prefix_len < 0.5 * before:
            return False
        is_shorter = len(outcome.encoded.tokens) <= _COMPACTED_SHARE * before
        # A later break continues an earlier path of the same agent.
        is_early = place.at <= _COMPACTED_SHARE * before
        if not (is_shorter and is_early):
            return False
        if step is None or place.at < _TEMPLATE_TOKENS:
            return True
        return step.old_len > _MAX_NOTE_TOKENS and step.new_len > _MAX_STUB_TOKENS

    def _describe(self, place: _Place, cause: Cause, step: Alignment | None) -> Break:
        encoded, at = place.outcome.encoded, place.at
        end = len(encoded.tokens)
        old_len, new_len = (None, None) if step is None else (step.old_len, step.new_len)
        num_old = len(place.old) if old_len is None else min(old_len, len(place.old))
        resumes = end if new_len is None else min(at + new_len, end)
        return Break(
            cause=cause,
            at=at,
            old_len=old_len,
            new_len=new_len,
            num_lost=place.outcome.num_repeated,
            num_behind=end - at,
            before=encoded.text(max(0, at - _CONTEXT_TOKENS), at),
            old=quote(lambda start, stop: self.decode(place.old[start:stop]), 0, num_old, _QUOTE_CHARS),
            new=quote(encoded.text, at, resumes, _QUOTE_CHARS),
            after=encoded.text(resumes, min(resumes + _CONTEXT_TOKENS, end)),
            neighbor=place.neighbor,
        )


class _Place(NamedTuple):
    """A break at `at`: the neighbor goes on with `old`, the prompt with `new`."""

    outcome: Outcome
    at: int
    old: Tokens
    new: Tokens
    neighbor: CallRef
    theirs: _Seen | None
    is_same_session: bool


def _shares(place: _Place) -> bool:
    """Whether enough of the text behind the break was there before to speak of a loss."""
    return place.outcome.num_repeated >= max(_SHARED_TOKENS, _SHARED_SHARE * len(place.new))


def _step_by_run(outcome: Outcome, place: _Place) -> Alignment | None:
    """The alignment of the first run that this session computed: `expected` may end before that run."""
    for run in outcome.runs:
        start = run.start - run.seam_len
        old_len = start - run.shift - place.at
        if run.donor.is_same_session(outcome.ref) and old_len >= len(place.old):
            return Alignment(old_len, start - place.at, run.end - start)
    return None


def _moved(place: _Place, step: Alignment | None) -> Cause | None:
    """Whether the old text of the break stands further down in the prompt, or the new text stood there before."""
    theirs = place.theirs
    if theirs is not None and _is_moved_note(place, theirs):
        return Cause.MOVED
    if step is None or max(step.old_len, step.new_len) < _MOVED_WINDOW:
        return None
    old, new = place.old[: step.old_len], place.new[: step.new_len]
    # The neighbor's *answer* stands behind its prompt; an answer that this prompt quotes has not been reordered.
    prompt_len = len(place.old) if theirs is None else max(theirs.prompt_len - place.at, step.old_len)
    old_rest, new_rest = place.old[step.old_len : prompt_len], place.new[step.new_len :]
    # Text that stands further down on both sides is a repetition and has not moved.
    went_down = _is_in(old, new_rest) and not _is_in(old, old_rest)
    came_up = _is_in(new, old_rest) and not _is_in(new, new_rest)
    if went_down and step.new_len <= _MAX_STUB_TOKENS:
        return Cause.REORDERED
    if max(step.old_len, step.new_len) <= _FIELD_TOKENS:
        return None
    if (went_down and came_up) or (came_up and step.old_len <= _MAX_FOREIGN_STUB_TOKENS):
        return Cause.REORDERED
    return None


def _is_moved_note(place: _Place, theirs: _Seen) -> bool:
    """Whether the end of the neighbor's prompt is gone from there and stands in a later message.

    If it still ends the same message, then text was inserted in front of it.
    """
    note = place.old[: max(0, theirs.prompt_len - place.at)]
    if not place.is_same_session or not _MOVED_WINDOW <= len(note) <= _MAX_NOTE_TOKENS:
        return False
    message_end = next(part.end for part in place.outcome.encoded.parts if part.end > place.at)
    cut = message_end - place.at
    return _is_in(note, place.new[cut:]) and not _is_in(note, place.new[:cut])


def _is_in(part: Tokens, whole: Tokens) -> bool:
    return contained_share(part, whole, _MOVED_WINDOW) >= _MOVED_SHARE


def _cause_of_lengths(step: Alignment | None, most_stub: int) -> Cause:
    if step is None:
        return Cause.REPLACED
    old_len, new_len = step.old_len, step.new_len
    if max(old_len, new_len) > _STUB_FROM:
        if old_len <= min(most_stub, _STUB_SHARE * new_len):
            return Cause.INSERTED
        if new_len <= min(most_stub, _STUB_SHARE * old_len):
            return Cause.REMOVED
    return Cause.FIELD if max(old_len, new_len) <= _FIELD_TOKENS else Cause.REPLACED
