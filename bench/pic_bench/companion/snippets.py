"""Bounded quotations: the head and the tail of a long span, and a pool that keeps each text once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

ELLIPSIS = " […] "
# Enough tokens for the characters wanted, in any tokenizer but one of single characters.
_CHARS_PER_TOKEN = 2


def quote(text: Callable[[int, int], str], start: int, end: int, max_chars: int) -> str:
    """The text of tokens `[start, end)`, at most about `max_chars` of it; the middle of a longer text is left out.

    Args:
        text: gives the text of a span of tokens.
        start: first token.
        end: behind the last one.
        max_chars: without the ellipsis.
    """
    most = max(8, max_chars // _CHARS_PER_TOKEN)
    if end - start <= most:
        whole = text(start, end)
        if len(whole) <= max_chars + len(ELLIPSIS):
            return whole
        head, tail = whole, whole
    else:
        head, tail = text(start, start + most), text(max(start, end - most // 2), end)
    tail_chars = max_chars // 3
    return f"{head[: max_chars - tail_chars]}{ELLIPSIS}{tail[-tail_chars:]}"


class Row(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """An object that the script reads by the same names, in camelCase. Texts are numbers in a list of texts."""


@dataclass(slots=True)
class SnippetPool:
    """Texts by number, each kept once; number 0 is the empty text.

    Args:
        max_bytes: of all texts together, in UTF-8. Texts that find no room get number 0.
    """

    max_bytes: int
    texts: list[str] = field(default_factory=lambda: [""])
    num_refused: int = 0
    _numbers: dict[str, int] = field(default_factory=lambda: {"": 0})
    _num_bytes: int = 0

    def add(self, text: str) -> int:
        """The number of a text."""
        number = self._numbers.get(text)
        if number is not None:
            return number
        num_bytes = len(text.encode())
        if self._num_bytes + num_bytes > self.max_bytes:
            self.num_refused += 1
            return 0
        self._num_bytes += num_bytes
        self._numbers[text] = len(self.texts)
        self.texts.append(text)
        return self._numbers[text]
