"""An encoder that needs no files: ChatML-like markers around the messages, and a splitter in place of a tokenizer.

Its figures are approximate: right in what repeats and where, near in how many tokens that is.
"""

from __future__ import annotations

import numpy as np

from pic_traces.encode.encoded import EncodedCall, Mark
from pic_traces.encode.pieces import split_pieces
from pic_traces.encode.prepare import ContentForm, Preparation, recorded_roles
from pic_traces.encode.tokenized import TokenizedCache, TokenizedText
from pic_traces.session import Call, Message

__all__ = ["StandInEncoder"]

_OPEN_ID, _CLOSE_ID = 1, 2
_OPEN, _CLOSE = "<|im_start|>", "<|im_end|>"


class StandInEncoder:
    """Implements `Encoder`; tools are flattened to text, as for a template that does not show them."""

    name = "words (no tokenizer given: counts are approximate)"
    is_exact = False
    delimiters = frozenset((_OPEN_ID, _CLOSE_ID))

    def __init__(self) -> None:
        self._contents = TokenizedCache(split_pieces)
        self._headers = TokenizedCache(_make_header)
        self._preparation = Preparation(ContentForm.TEXT)
        self._footer = _join(_marker(_CLOSE, _CLOSE_ID), split_pieces("\n"))
        self._end_of_turn = _marker(_CLOSE, _CLOSE_ID)

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the calls so far is not as a server would have it."""
        return self._preparation.notes()

    def encode(self, call: Call) -> EncodedCall:
        """The ids of one call."""
        messages = self._preparation.flatten(call.messages, call.tools)
        stretches: list[TokenizedText] = []
        marks: list[Mark] = []
        at = 0
        for message, role in zip(messages, recorded_roles(call.messages, messages), strict=True):
            header = self._headers.get(str(message["role"]))
            content = self._contents.get(str(message["content"]))
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
        return (self._contents.get(str(message["content"])), self._end_of_turn)


def _make_header(role: str) -> TokenizedText:
    return _join(_marker(_OPEN, _OPEN_ID), split_pieces(role), split_pieces("\n"))


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
