"""Text from logs, prompts and servers as a terminal may show it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import TextIOWrapper
from typing import Any, TextIO

# C0 but tab and newline, DEL and C1, which terminals obey; marks that turn the direction of what comes after them; half
# characters, as in names of files that are not UTF-8, which no terminal takes.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters as escapes, such as `\\u001b`, also in JSON; tabs and line ends stay."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@contextmanager
def printable_output() -> Iterator[None]:
    """Print text as `printable` says: in the context, or in a function that this decorates.

    What the encoding of a stream lacks is escaped, too.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with redirect_stdout(_escaping(sys.stdout)), redirect_stderr(_escaping(sys.stderr)):
        yield


class _Escaping:
    """A text stream in front of another one; a carriage return that begins a text stays, because bars redraw so."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        rest = text.removeprefix("\r")
        self._stream.write(text[: len(text) - len(rest)] + printable(rest))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _escaping(stream: TextIO | None) -> Any:
    return None if stream is None else _Escaping(stream)
