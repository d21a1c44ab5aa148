"""Breaks grouped by cause, and by how the changed place looks; the most costly first."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_pic.census.outcome import Outcome
from sglang_pic.census.tally import Tally
from sglang_pic.explain.cause import Cause
from sglang_pic.explain.diagnose import Break, Diagnoser
from sglang_pic.explain.token_texts import TokenTexts

NUM_EXAMPLES = 5
_SIGNATURE_CHARS = 40
_WORD_WITH_DIGITS = re.compile(r"((?:[A-Za-z]+_)*)[A-Za-z_-]*\d[A-Za-z0-9_-]*")
_SPACE = re.compile(r"\s+")
# A last line shorter than this does not identify a place.
_MIN_LINE_CHARS = 4


class Example(NamedTuple):
    """A call with its break."""

    session: str
    call: int
    agent: str | None
    prompt_len: int
    prefix_len: int
    num_guarded: int
    """Tokens that are computed because of a changed field."""
    found: Break


@dataclass(slots=True)
class Group:
    """The breaks of one cause at places that look alike, or of one cause."""

    signature: str = ""
    num_calls: int = 0
    num_lost: int = 0
    num_spliced: int = 0
    num_guarded: int = 0
    num_behind: int = 0
    examples: list[Example] = field(default_factory=list)
    """The calls that lost most, at most `NUM_EXAMPLES`; of equal losses the earlier call first."""

    def add(self, example: Example) -> None:
        """Count one call."""
        found = example.found
        self.num_calls += 1
        self.num_lost += found.num_lost
        self.num_spliced += found.num_spliced
        self.num_guarded += example.num_guarded
        self.num_behind += found.num_behind
        self.examples.append(example)
        # Sorting is stable.
        self.examples.sort(key=lambda one: -one.found.num_lost)
        del self.examples[NUM_EXAMPLES:]


@dataclass(slots=True)
class CauseGroup:
    """One cause with its places."""

    cause: Cause
    total: Group
    places: list[Group]
    """The most costly first."""

    @property
    def advice(self) -> str:
        """What the cause means and what helps; of known nonces with the switch of each."""
        if self.cause is not Cause.NONCE:
            return self.cause.advice
        return f"{self.cause.advice} Here: {'; '.join(place.signature for place in self.places)}."


@dataclass(slots=True)
class Figures(Tally):
    """The counts of the census, and repeated text that no break caused."""

    appending_calls: int = 0
    """Calls without a break that repeat text."""
    appended_tokens: int = 0
    """The tokens of these repetitions that are spliced."""


@dataclass(slots=True)
class Findings:
    """All breaks of the calls that were added. Memory grows with the number of places that look different."""

    figures: Figures = field(default_factory=Figures)
    _texts: TokenTexts = field(default_factory=TokenTexts)
    _diagnoser: Diagnoser = field(init=False)
    _groups: dict[Cause, dict[str, Group]] = field(default_factory=dict)
    _totals: dict[Cause, Group] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._diagnoser = Diagnoser(self._texts.decode)

    def add(self, outcome: Outcome) -> Break | None:
        """Count one call, and return its break; calls must be added in their order."""
        ref, encoded = outcome.ref, outcome.encoded
        found = self._diagnoser.diagnose(outcome)
        self._texts.learn(encoded, outcome.prefix_len)
        self.figures.add(outcome)
        if found is not None:
            lengths = len(encoded.tokens), outcome.prefix_len, outcome.num_guarded
            example = Example(ref.session, ref.index, outcome.agent, *lengths, found)
            signature = _signature(found, outcome.agent)
            self._groups.setdefault(found.cause, {}).setdefault(signature, Group(signature)).add(example)
            self._totals.setdefault(found.cause, Group()).add(example)
        elif outcome.num_repeated:
            self.figures.appending_calls += 1
            self.figures.appended_tokens += outcome.num_chunk_hit
        return found

    def ranked(self) -> list[CauseGroup]:
        """The causes that occurred, by lost tokens, then by tokens after the breaks; their places likewise."""
        found = [
            CauseGroup(cause, self._totals[cause], sorted(places.values(), key=_rank))
            for cause, places in self._groups.items()
        ]
        return sorted(found, key=lambda one: _rank(one.total))


def _rank(group: Group) -> tuple[int, int]:
    return -group.num_lost, -group.num_behind


def _signature(found: Break, agent: str | None) -> str:
    if found.nonce is not None:
        return f"{found.nonce.title}: {found.nonce.switch}"
    match found.cause:
        case Cause.COMPACTION | Cause.NEW_TASK:
            return ""
        case Cause.AGENT if agent is not None:
            return _mask(agent)
        case Cause.MOVED | Cause.REMOVED | Cause.THOUGHT if found.old.strip():
            # The text before a note differs every time; the note does not.
            return _mask(_named(found.old, found.after))[:_SIGNATURE_CHARS]
        case Cause.INSERTED:
            return _mask(_named(found.after, found.new))[:_SIGNATURE_CHARS]
        case _:
            text = found.before.rstrip()
            line = text.rsplit("\n", 1)[-1]
            return _mask(line if len(line.strip()) >= _MIN_LINE_CHARS else text)[-_SIGNATURE_CHARS:]


def _named(block: str, other: str) -> str:
    """A block from where it differs from the one beside it: the frame of tools and messages names no place."""
    pairs = enumerate(zip(block, other, strict=False))
    return block[next((at for at, (left, right) in pairs if left != right), 0) :].strip()


def _mask(text: str) -> str:
    """Digits, and words that contain digits, become `#`; `mcp_3` becomes `mcp_#`."""
    return _SPACE.sub(" ", _WORD_WITH_DIGITS.sub(r"\1#", text)).strip()
