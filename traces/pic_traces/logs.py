"""Logs read into sessions: each line goes to the reader of its format, lines of no known format are passed over."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pic_traces.errors import LineError, TraceError
from pic_traces.formats import NO_JSON, READERS, Grouping, Reader, Request, SGLangLog, refusal
from pic_traces.lines import Line, read_lines
from pic_traces.session import Session

_logger = logging.getLogger(__name__)
_MAX_REASONS = 3


@dataclass(slots=True)
class Passed:
    """Lines that were passed over, counted by reason, with the first place of each.

    Args:
        is_strict: refuse the first such line instead.
        is_logged: log a warning when a log has been read.
    """

    is_strict: bool = False
    is_logged: bool = False
    reasons: Counter[str] = field(default_factory=Counter)
    places: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the formats that were read do not say."""

    def add(self, error: LineError) -> None:
        """Note a line.

        Raises:
            LineError: the line, where all are to be read.
        """
        if self.is_strict:
            raise error
        self.reasons[error.reason] += 1
        self.places.setdefault(error.reason, error.place)

    def summary(self) -> str | None:
        """What was passed over, in a sentence; None if nothing was."""
        if not self.reasons:
            return None
        named = [
            f"{num:,} {reason} (first {self.places[reason]})" for reason, num in self.reasons.most_common(_MAX_REASONS)
        ]
        more = len(self.reasons) - len(named)
        rest = f"; {more} more reasons" if more else ""
        total = self.reasons.total()
        return f"passed over {total:,} line{'s' * (total > 1)}: {'; '.join(named)}{rest} (--strict refuses them)"


def read_logs(paths: Iterable[Path], source: str, root: Path, passed: Passed) -> Iterator[Session]:
    """Yield the sessions of log files: recorded sessions and trajectories as they come, then the grouped requests.

    Requests with one session id are calls of one session, whichever files they are from. A line without an id is a
    session of its own.

    Args:
        paths: the files.
        source: what the sessions are said to be from.
        root: folder that names of sessions are relative to.
        passed: notes what is passed over.

    Raises:
        TraceError: a file cannot be read or would be counted wrongly, or has lines and not one that can be read.
    """
    grouping, readers = Grouping(), dict[type[Reader], Reader]()
    paths = list(paths)
    num_lines = num_read = 0
    for path in paths:
        for line in _lines(path, passed):
            num_lines += 1
            for one in _taken(readers, line, passed):
                num_read += 1
                if isinstance(one, Session):
                    yield one
                else:
                    grouping.add(one, one.session or _name(line, root, is_one=len(paths) == 1))
        is_last = path == paths[-1]
        for kind in [kind for kind in readers if kind.is_per_file or is_last]:
            for one in readers.pop(kind).end():
                num_read += 1
                if isinstance(one, Session):
                    yield one
                else:
                    grouping.add(one, one.session or path.name)
    if not num_read and (num_lines or passed.reasons):
        raise _nothing(paths[0], passed)
    yield from grouping.sessions(source)
    if passed.is_logged and (summary := passed.summary()):
        _logger.warning("%s: %s", source, summary)


def _taken(readers: dict[type[Reader], Reader], line: Line, passed: Passed) -> Iterator[Request | Session]:
    kind = next((kind for kind in READERS if kind.recognizes(line)), None)
    try:
        if kind is None:
            raise line.error(refusal(line))
        if kind not in readers:
            readers[kind] = kind()
            if kind.note and kind.note not in passed.notes:
                passed.notes.append(kind.note)
        yield from readers[kind].take(line)
    except LineError as error:
        # A server writes other lines, too, between the requests that it logs.
        if error.reason != NO_JSON or SGLangLog not in readers:
            passed.add(error)


def _lines(path: Path, passed: Passed) -> Iterator[Line]:
    """The lines of a file, up to where it is damaged."""
    try:
        yield from read_lines(path)
    except LineError as error:
        passed.add(error)


def _nothing(path: Path, passed: Passed) -> TraceError:
    """Why nothing at all could be read."""
    reasons = [reason for reason in passed.reasons if reason != NO_JSON] or [*passed.reasons]
    if not reasons:
        return TraceError(f"{path}: a log without one call in it")
    return LineError(passed.places[reasons[0]], reasons[0])


def _name(line: Line, root: Path, *, is_one: bool) -> str:
    """The name of a session of one line."""
    return f"line-{line.number:06d}" if is_one else f"{line.path.relative_to(root)}-{line.number:06d}"
