"""The texts around blocks and the facts of generated questions, from words.json."""

from __future__ import annotations

from pathlib import Path

import msgspec


class FrameWords(msgspec.Struct, frozen=True):
    """The words of a prompt's frame and of its donors'."""

    markers: list[str]
    donor_markers: list[str]
    header: str
    donor_header: str


class FactWords(msgspec.Struct, frozen=True):
    """Names of persons, values of four facts, a text with the facts' places, and questions with their leads."""

    names: list[str]
    values: dict[str, list[str]]
    life: str
    asking: dict[str, tuple[str, str]]


class _Words(msgspec.Struct, frozen=True):
    passages: FrameWords
    questions: FrameWords
    facts: FactWords


_WORDS = msgspec.json.decode(Path(__file__).with_name("words.json").read_bytes(), type=_Words)
PASSAGES, QUESTIONS, FACTS = _WORDS.passages, _WORDS.questions, _WORDS.facts
