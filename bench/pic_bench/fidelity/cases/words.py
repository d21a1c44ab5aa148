"""The texts around blocks, from words.json."""

from __future__ import annotations

from pathlib import Path

import msgspec


class FrameWords(msgspec.Struct, frozen=True):
    """The words of a prompt's frame and of its donors'."""

    markers: list[str]
    donor_markers: list[str]
    header: str
    donor_header: str


class _Words(msgspec.Struct, frozen=True):
    passages: FrameWords
    questions: FrameWords


_WORDS = msgspec.json.decode(Path(__file__).with_name("words.json").read_bytes(), type=_Words)
PASSAGES, QUESTIONS = _WORDS.passages, _WORDS.questions
