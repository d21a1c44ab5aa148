"""Text from logs, prompts and servers as a terminal may show it."""

from __future__ import annotations

import re

# C0 but tab and newline, DEL and C1, which terminals obey; marks that turn the direction of what comes after them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with control characters as escapes, such as `\\x1b`; tabs and line ends stay."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
