"""Finds what broke a call's prefix: the place, the old and the new text, and the cause.

The rules were made on recorded sessions of coding agents, role-playing agents and customer service, and on the patterns
of `test_explain_patterns.py`, which has patterns of other words, sizes and places, too. The numbers below are tokens or
shares of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from pic_traces.encode.encoded import Tokens

from sglang_pic.census.outcome import CallRef, Outcome
from sglang_pic.census.windows import WindowSearch
from sglang_pic.core import common_len, common_suffix_len
from sglang_pic.explain.cause import Cause
from sglang_pic.explain.fields import cause_of, cause_of_image, cause_of_json, cause_of_several, is_role, is_thought
from sglang_pic.explain.rejoin import WINDOW, Alignment, align, contained_share, moved_share
from sglang_pic.nonces import NONCES, Nonce

# A changed field has at most this many tokens on either side; a longer change is a block.
_FIELD_TOKENS = 24
# Fields that change together (the time, the number of messages, the model) are in step again after at most this many.
_FIELDS_TOKENS = 96
# Windows that show that a block is at another place. They are shorter than the windows of the alignment, because a
# number in the block may have changed ("19 turns left").
_MOVED_WINDOW = 8
_MOVED_SHARE = 0.6
# A prompt was compacted if it has at most this share of the agent's previous prompt, and that one was long.
_COMPACTED_SHARE = 0.7
_COMPACTED_FROM = 2_000
# An agent keeps a history if its last prompt had this share of it in the cache.
_CONTINUED_SHARE = 0.5
# A note that moves is at most this long; a longer text is a document.
_MAX_NOTE_TOKENS = 256
# A removed block may leave a stub ("[old tool result cleared]"); in another session a stub would be another text.
_STUB_SHARE = 1 / 3
_STUB_FROM = 16
# A line of a list that grows or shrinks, with nothing in its place.
_LINE_FROM = 6
_MAX_STUB_TOKENS = 24
_MAX_FOREIGN_STUB_TOKENS = 4
# Any two prompts of one template share fewer recoverable tokens than this.
_SHARED_TOKENS = 64
_SHARED_SHARE = 0.1
# Any two prompts of one template begin with about this many equal tokens.
_TEMPLATE_TOKENS = 8
# A system prompt that differs this near its front is another agent's.
_HEAD_TOKENS = 48
# A prompt with this share of its rest in another order than before was put together anew.
_REORDERED_SHARE = 0.1
_CONTEXT_TOKENS = 40
# Of the text around a break: enough for the line of a tool schema.
_LINE_TOKENS = 1_500
_QUOTE_CHARS = 240
_ELLIPSIS = " […] "


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """Where and why a prompt differs from the longest matching earlier path, its neighbor."""

    cause: Cause
    at: int
    """The first token that differs."""
    old_len: int | None
    """Tokens of the neighbor until both are the same again; None if they never are."""
    new_len: int | None
    """Tokens of the prompt until then."""
    num_lost: int
    """Tokens after the break that were there before, 16 or more in a row, and that a prefix cache computes again."""
    num_spliced: int
    """The lost tokens that are spliced."""
    num_behind: int
    """All tokens after the break."""
    before: str
    old: str
    new: str
    after: str
    neighbor: CallRef
    nonce: Nonce | None = None
    """The known nonce that changed, if that is the cause."""


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
    _windows: WindowSearch = field(default_factory=lambda: WindowSearch(WINDOW))
    # Tokens of the present call that were there before, after its prefix.
    _num_seen: int = 0
    # The last prompt of each agent of the session that is running.
    _session: tuple[str, str] | None = None
    _last: dict[str | None, Outcome] = field(default_factory=dict)

    def diagnose(self, outcome: Outcome) -> Break | None:
        """What broke this call's prefix; None if the whole prompt was there before, or continues an earlier path."""
        ref, prompt_len = outcome.ref, len(outcome.encoded.tokens)
        path, prefix_len = outcome.encoded.path, outcome.prefix_len
        seen = self._windows.observe(path, prompt_len=prompt_len, prefix_len=prefix_len)
        self._num_seen = max(seen.num_behind, outcome.num_repeated)
        found = self._find(outcome)
        if found is None or self._is_aside(outcome, found):
            found = self._find_aside(outcome) or found
        if self._session != (ref.file, ref.session):
            self._session, self._last = (ref.file, ref.session), {}
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
        if same in (len(rest), len(old)):
            return None
        theirs = self._seen.get(outcome.neighbor.number)
        at = outcome.prefix_len + same
        place = _Place(outcome, at, old[same:], rest[same:], outcome.neighbor, theirs, self._num_seen)
        step = align(place.old, place.new) or _step_by_run(outcome, place)
        return self._describe(place, self._classify(place, step), step)

    def _is_aside(self, outcome: Outcome, found: Break) -> bool:
        """Whether the lost text is in the last call of the agent, and not in the older call that this one continues."""
        last = self._last.get(outcome.agent)
        if last is None or found.neighbor == last.ref or not found.neighbor.is_same_session(outcome.ref):
            return False
        rest = outcome.encoded.tokens[found.at :]
        there = contained_share(rest, outcome.expected[found.at - outcome.prefix_len :])
        return contained_share(rest, last.encoded.path) > 2 * there + _REORDERED_SHARE

    def _find_aside(self, outcome: Outcome) -> Break | None:
        """The break of a call that continues an older path than the last one of its agent.

        A list that alternates between two orders finds each order in the cache, but none of the later messages.
        """
        ref, last = outcome.ref, self._last.get(outcome.agent)
        if self._session != (ref.file, ref.session) or last is None or self._num_seen < _SHARED_TOKENS:
            return None
        new, old = outcome.encoded.tokens, last.encoded.path
        at = common_len(old, new)
        if at >= min(outcome.prefix_len, len(old), len(new)):
            return None
        theirs = self._seen.get(last.ref.number)
        place = _Place(outcome, at, old[at:], new[at:], last.ref, theirs, self._num_seen)
        step = align(place.old, place.new)
        return self._describe(place, self._classify(place, step), step)

    def _classify(self, place: _Place, step: Alignment | None) -> Cause:
        found = Cause.NONCE if self._nonce_of(place) else None
        found = found or self._value_of(place, step) or self._other_prompt(place, step)
        found = found or self._passage_of(place) or _moved(place, step) or (Cause.ANSWER if place.is_answer else None)
        if found is not None:
            return found
        most_stub = _MAX_STUB_TOKENS if place.is_same_session else _MAX_FOREIGN_STUB_TOKENS
        return _finer(place, step, _cause_of_lengths(step, most_stub))

    def _nonce_of(self, place: _Place) -> Nonce | None:
        """The known nonce within which both texts differ."""
        if not place.is_same_session and not _shares(place):
            return None
        encoded, at = place.outcome.encoded, place.at
        before, end = encoded.text(max(0, at - _LINE_TOKENS), at), min(at + _FIELDS_TOKENS, len(encoded.tokens))
        texts = before + self.decode(place.old[:_FIELDS_TOKENS]), before + encoded.text(at, end)
        return next((one for one in NONCES.values() if all(one.is_at(len(before), text) for text in texts)), None)

    def _passage_of(self, place: _Place) -> Cause | None:
        """The cause if the text at the break shows it: a thought, or an object that is written in another way."""
        encoded, at = place.outcome.encoded, place.at
        before, old = encoded.text(max(0, at - _LINE_TOKENS), at), self.decode(place.old[:_LINE_TOKENS])
        new = encoded.text(at, min(at + _LINE_TOKENS, len(encoded.tokens)))
        if is_thought(before, old, new):
            return Cause.THOUGHT
        return None if place.is_answer else cause_of_json(before, old, new)

    def _value_of(self, place: _Place, step: Alignment | None) -> Cause | None:
        """The cause if a value of a known kind changed, whichever agent made the call."""
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
            if is_role(old, new):
                return Cause.ANSWER
            found = cause_of_image(before, f"{old}{after}", f"{new}{after}") or cause_of(before, old, new, after)
            if found is not None:
                return found
        return cause_of_several(before, old, new)

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
        if last is None or before < _COMPACTED_FROM or last.prefix_len < _CONTINUED_SHARE * before:
            return False
        is_shorter = len(outcome.encoded.tokens) <= _COMPACTED_SHARE * before
        # A later break continues an earlier path of the same agent.
        is_early = place.at <= _COMPACTED_SHARE * before
        if not (is_shorter and is_early):
            return False
        # So few tokens are the beginning of any call of a tool.
        if step is None or place.at < _TEMPLATE_TOKENS or step.same_len < _SHARED_TOKENS:
            return True
        return step.old_len > _MAX_NOTE_TOKENS and step.new_len > _MAX_STUB_TOKENS

    def _describe(self, place: _Place, cause: Cause, step: Alignment | None) -> Break:
        encoded, at = place.outcome.encoded, place.at
        end = len(encoded.tokens)
        old_len, new_len = (None, None) if step is None else (step.old_len, step.new_len)
        # Where the quoted block begins: at the break, or at the beginning of its line if it can.
        start = at - _led(place, step)
        led = np.concatenate([encoded.tokens[start:at], place.old])
        num_old = len(led) if old_len is None else min(old_len, len(led))
        resumes = end if new_len is None else min(start + new_len, end)
        return Break(
            cause=cause,
            at=at,
            old_len=old_len,
            new_len=new_len,
            num_lost=self._num_seen,
            num_spliced=place.outcome.num_chunk_hit,
            num_behind=end - at,
            before=encoded.text(max(0, start - _CONTEXT_TOKENS), start),
            old=_quote(lambda start, end: self.decode(led[start:end]), 0, num_old),
            new=_quote(encoded.text, start, resumes),
            after=encoded.text(resumes, min(resumes + _CONTEXT_TOKENS, end)),
            neighbor=place.neighbor,
            nonce=self._nonce_of(place) if cause is Cause.NONCE else None,
        )


class _Place(NamedTuple):
    """A break at `at`: the neighbor continues with `old`, the prompt with `new`."""

    outcome: Outcome
    at: int
    old: Tokens
    new: Tokens
    neighbor: CallRef
    theirs: _Seen | None
    num_seen: int
    """Tokens after the prefix that were there before."""

    @property
    def is_same_session(self) -> bool:
        """Whether both calls belong to one session."""
        return self.neighbor.is_same_session(self.outcome.ref)

    @property
    def old_prompt(self) -> Tokens:
        """`old` without the neighbor's answer: text that this prompt quotes from an answer has not moved."""
        return self.old if self.theirs is None else self.old[: max(0, self.theirs.prompt_len - self.at)]

    @property
    def is_answer(self) -> bool:
        """Whether the earlier path continues with its answer here."""
        return self.is_same_session and self.theirs is not None and self.at >= self.theirs.prompt_len


def _shares(place: _Place) -> bool:
    """Whether enough of the text after the break was there before to call it a loss."""
    return place.num_seen >= max(_SHARED_TOKENS, _SHARED_SHARE * len(place.new))


def _led(place: _Place, step: Alignment | None) -> int:
    """How many tokens before the break an inserted or removed block can be said to begin, to be of whole lines.

    `{A}{B}{C}` that became `{A}{C}` differs within `{B}`, as far as `{B}` and `{C}` begin alike.
    """
    if step is None or (step.old_len and step.new_len):
        return 0
    encoded, at = place.outcome.encoded, place.at
    block = place.old[: step.old_len] if step.old_len else place.new[: step.new_len]
    most = min(common_suffix_len(encoded.tokens[:at], block), at - 1)
    return next((n for n in range(most + 1) if encoded.text(at - n - 1, at - n).endswith("\n")), 0)


def _step_by_run(outcome: Outcome, place: _Place) -> Alignment | None:
    """The alignment of the first run that this session computed: `expected` may end before that run."""
    for run in outcome.runs:
        start = run.start - run.seam_len
        old_len = start - run.shift - place.at
        if run.donor.is_same_session(outcome.ref) and old_len >= len(place.old):
            return Alignment(old_len, start - place.at, run.end - start)
    return None


def _moved(place: _Place, step: Alignment | None) -> Cause | None:
    """Whether the old text is further down in the prompt, or the new text was further down before."""
    if place.theirs is not None and _is_moved_note(place):
        return Cause.MOVED
    if step is None or max(step.old_len, step.new_len) < _MOVED_WINDOW:
        return None
    old, new = place.old[: step.old_len], place.new[: step.new_len]
    old_rest, new_rest = place.old_prompt[step.old_len :], place.new[step.new_len :]
    # Text that is further down on both sides is a repetition and has not moved.
    went_down = _is_in(old, new_rest) and not _is_in(old, old_rest)
    came_up = _is_in(new, old_rest) and not _is_in(new, new_rest)
    if went_down and step.new_len <= _MAX_STUB_TOKENS:
        is_note = place.is_same_session and step.old_len <= _MAX_NOTE_TOKENS
        return Cause.MOVED if is_note and _is_in(old, place.new[len(place.old_prompt) :]) else Cause.REORDERED
    if max(step.old_len, step.new_len) <= _FIELD_TOKENS:
        return None
    if (went_down and came_up) or (came_up and step.old_len <= _MAX_FOREIGN_STUB_TOKENS):
        return Cause.REORDERED
    return None


def _is_moved_note(place: _Place) -> bool:
    """Whether the end of the neighbor's prompt is gone from there and is in a later message.

    If it still ends the same message, then text was inserted before it.
    """
    note = place.old_prompt
    if not place.is_same_session or len(note) < _MOVED_WINDOW:
        return False
    message_end = next(part.end for part in place.outcome.encoded.parts if part.end > place.at)
    cut = message_end - place.at
    opening = place.outcome.encoded.tokens[place.outcome.encoded.parts[-1].start]
    # Several messages: text was inserted before them.
    if len(note) > _MAX_NOTE_TOKENS and (note == opening).sum() > 2:
        return False
    if len(note) > _MAX_NOTE_TOKENS:
        # A longer text, such as what was retrieved, was at the end, and what begins alike is there again.
        return cut < len(place.new) and _begins_in(note, place.new[cut:]) and not _begins_in(note, place.new[:cut])
    return _is_in(note, place.new[cut:]) and not _is_in(note, place.new[:cut])


def _is_in(part: Tokens, whole: Tokens) -> bool:
    return contained_share(part, whole, _MOVED_WINDOW) >= _MOVED_SHARE


def _begins_in(part: Tokens, whole: Tokens) -> bool:
    return contained_share(part[:WINDOW], whole, _MOVED_WINDOW) >= _MOVED_SHARE


def _finer(place: _Place, step: Alignment | None, cause: Cause) -> Cause:
    """The cause of a block after a look at the text that follows it: another agent, or another order."""
    parts = place.outcome.encoded.parts
    opening = place.outcome.encoded.tokens[parts[-1].start]
    # Whole messages that are gone are a sliding window, wherever the rest of the prompt was before.
    is_window = step is not None and step.new_len <= _MAX_FOREIGN_STUB_TOKENS and opening in place.old[: step.old_len]
    if step is None or cause is Cause.FIELD or (cause is Cause.REMOVED and is_window):
        return cause
    part = next(part for part in parts if part.end > place.at)
    # Another system prompt from its first words on, and to its end if the session goes on.
    is_whole = not place.is_same_session or place.at + step.new_len + WINDOW > part.end
    if cause is Cause.REPLACED and part.role == "system" and place.at < _HEAD_TOKENS and is_whole:
        return Cause.AGENT
    return Cause.REORDERED if moved_share(place.old_prompt, place.new) >= _REORDERED_SHARE else cause


def _cause_of_lengths(step: Alignment | None, most_stub: int) -> Cause:
    if step is None:
        return Cause.REPLACED
    old_len, new_len = step.old_len, step.new_len
    if max(old_len, new_len) > (_STUB_FROM if min(old_len, new_len) else _LINE_FROM):
        if old_len <= min(most_stub, _STUB_SHARE * new_len):
            return Cause.INSERTED
        if new_len <= min(most_stub, _STUB_SHARE * old_len):
            return Cause.REMOVED
    return Cause.FIELD if max(old_len, new_len) <= _FIELD_TOKENS else Cause.REPLACED


def _quote(text: Callable[[int, int], str], start: int, end: int) -> str:
    """The text of tokens `[start, end)`, about `_QUOTE_CHARS` of it; the middle of a longer text is left out."""
    # Half as many tokens as characters suffice in any tokenizer but one of single characters.
    most = _QUOTE_CHARS // 2
    if end - start <= most:
        head = tail = text(start, end)
        if len(head) <= _QUOTE_CHARS + len(_ELLIPSIS):
            return head
    else:
        head, tail = text(start, start + most), text(max(start, end - most // 2), end)
    tail_chars = _QUOTE_CHARS // 3
    return f"{head[: _QUOTE_CHARS - tail_chars]}{_ELLIPSIS}{tail[-tail_chars:]}"
