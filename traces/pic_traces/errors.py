"""The exceptions of traces and their replay.

TraceError        a trace, a tokenizer or a chat template cannot be read
├── LineError     one line of a log cannot be read; the lines around it can
├── OptionError   a word of the user's cannot be used: an option, a run folder, the name of a file
└── ReplayError   a server or a replay failed, or what a replay wrote cannot be read
"""

from __future__ import annotations


class TraceError(Exception):
    """Base of this package's errors; by itself: a trace cannot be read. The message names the file and the place."""


class LineError(TraceError):
    """One line of a log cannot be read: it is of another kind, or damaged.

    Args:
        place: file and line.
        reason: what is wrong, the same for all lines of which the same is wrong.
    """

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place, self.reason = place, reason


class OptionError(TraceError, ValueError):
    """An option, a run folder or the name of a file cannot be used; the message says what is allowed."""


class ReplayError(TraceError):
    """A server or a replay failed, or what a replay wrote cannot be read; the message says where to look."""
