"""An encoder that needs no files: ChatML-like markers around the messages, and a regular expression for a tokenizer.

Its figures are approximate: right in what repeats and where, near in how many tokens that is. Prompt tokens of all
calls, as a multiple of SmolLM2's (tools flattened in both): ChatDev 1.04, Claude Code 0.97, mini-swe 1.04, moatless
0.96, OpenDevin 1.02, tau-bench 1.08 (JSON schemas). English text and code; other scripts take a piece a character.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from pic_traces.encode.encoded import EncodedCall, Mark
from pic_traces.encode.prepare import ContentForm, Preparation, recorded_roles
from pic_traces.encode.tokenized import TokenizedCache, TokenizedText
from pic_traces.session import Call, Message

# Longest pieces swept against SmolLM2's tokenizer on six recorded sets, 2026-11; digits in pairs
# stand between tokenizers that take one at a time (SmolLM2) and three.
_PIECE = re.compile(
    r" [A-Z]?[a-z]{1,10}"  # a word begins with its space; more than that of it is cut off
    r"|[A-Z]?[a-z]{1,5}"
    r"| ?[A-Z]{1,2}(?![a-z])"
    r"|[0-9]{1,2}"
    r"| ?[!-/:-@\[-`{-~]{1,2}"
    r"|\s+(?!\S)|\s+"  # whitespace leaves its last space to the word behind it
    r"|.",
    re.DOTALL,
)

_OPEN, _CLOSE = "<|im_start|>", "<|im_end|>"
_OPEN_ID, _CLOSE_ID = 0, 1


class StandInEncoder:
    """Implements `Encoder`; tools are flattened to text, as for a template that does not show them.

    Thoughts are shown as most templates of thinking models do: those behind the last message of the user.
    """

    name = "words (no tokenizer given: counts are approximate)"
    is_exact = False
    delimiters = frozenset((_OPEN_ID, _CLOSE_ID))

    def __init__(self) -> None:
        self._vocabulary = Vocabulary([_OPEN, _CLOSE])
        self._contents = TokenizedCache(self._vocabulary.split)
        self._headers = TokenizedCache(self._make_header)
        self._preparation = Preparation(ContentForm.TEXT)
        self._footer = _join(_marker(_CLOSE, _CLOSE_ID), self._vocabulary.split("\n"))
        self._end_of_turn = _marker(_CLOSE, _CLOSE_ID)

    @property
    def texts(self) -> Sequence[str]:
        """The pieces so far; a piece that the markers spell is not a marker."""
        return self._vocabulary.texts

    @property
    def notes(self) -> tuple[str, ...]:
        """How the calls so far differ from what a server would be sent, for reports; empty if they do not."""
        return self._preparation.notes()

    def encode(self, call: Call) -> EncodedCall:
        """The ids of one call."""
        messages = self._preparation.flatten(call.messages, call.tools)
        stretches: list[TokenizedText] = []
        marks: list[Mark] = []
        at = 0
        roles = recorded_roles(call.messages, messages)
        asked = max((number for number, role in enumerate(roles) if role == "user"), default=-1)
        for number, (message, role) in enumerate(zip(messages, roles, strict=True)):
            header = self._headers.get(str(message["role"]))
            content = self._contents.get(_shown(message) if number > asked else str(message["content"]))
            stretches += (header, content, self._footer)
            marks.append(Mark(at, role))
            at += len(header.text) + len(content.text) + len(self._footer.text)
        stretches.append(self._headers.get("assistant"))
        marks.append(Mark(at, "template"))
        return EncodedCall(stretches, self._answer(call.completion), lambda: marks)

    def _answer(self, completion: Message | None) -> tuple[TokenizedText, ...]:
        if completion is None:
            return ()
        (message,) = self._preparation.flatten([completion], None)
        return (self._contents.get(_shown(message)), self._end_of_turn)

    def _make_header(self, role: str) -> TokenizedText:
        split = self._vocabulary.split
        return _join(_marker(_OPEN, _OPEN_ID), split(role), split("\n"))


def _shown(message: Message) -> str:
    """An answer's text with the thought before it."""
    content, thought = str(message["content"]), message.get("reasoning_content")
    is_thought = message.get("role") == "assistant" and isinstance(thought, str) and thought
    return f"<think>\n{thought}\n</think>\n\n{content}" if is_thought else content


class Vocabulary:
    """Pieces by their ids, which they get in the order in which they are first seen.

    Args:
        reserved: texts of the first ids, which no piece gets.
    """

    def __init__(self, reserved: Sequence[str] = ()) -> None:
        self.texts = list(reserved)
        self._ids: dict[str, int] = {}

    def split(self, text: str) -> TokenizedText:
        """A text as pieces: words with their leading space, digits in groups, punctuation, runs of whitespace.

        Every character is in one piece, so the pieces joined are the text. O(n).
        """
        pieces = _PIECE.findall(text)
        ids = np.fromiter(map(self._id, pieces), np.int32, len(pieces))
        starts = np.zeros(len(pieces), np.int32)
        np.cumsum(np.fromiter(map(len, pieces), np.int32, len(pieces))[:-1], out=starts[1:])
        return TokenizedText(text, ids, starts)

    def _id(self, piece: str) -> int:
        found = self._ids.get(piece)
        if found is None:
            found = self._ids[piece] = len(self.texts)
            self.texts.append(piece)
        return found


def _marker(text: str, token_id: int) -> TokenizedText:
    return TokenizedText(text, np.array([token_id], np.int32), np.zeros(1, np.int32))


def _join(*stretches: TokenizedText) -> TokenizedText:
    """One stretch of several; its keys in a cache may be shorter than its text."""
    starts, at = [], 0
    for stretch in stretches:
        starts.append(stretch.starts + np.int32(at))
        at += len(stretch.text)
    text = "".join(stretch.text for stretch in stretches)
    return TokenizedText(text, np.concatenate([stretch.ids for stretch in stretches]), np.concatenate(starts))
