"""Logs read into sessions: each line goes to the reader of its format, lines of no known format are passed over."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pic_traces.custom import CustomReader
from pic_traces.errors import LineError, TraceError
from pic_traces.formats import (
    NO_JSON,
    NO_MODEL,
    READERS,
    Envelopes,
    Grouping,
    Reader,
    Request,
    SGLangLog,
    Unread,
    refusal,
)
from pic_traces.formats.chat import Chat
from pic_traces.formats.responses import Responses
from pic_traces.formats.times import first_time
from pic_traces.lines import ROTATED, Line, read_first_bytes, read_lines
from pic_traces.session import Session

_logger = logging.getLogger(__name__)
_MAX_REASONS = 3
_MAX_ENVELOPES = 5
_HEAD_BYTES = 1 << 16
_DATE_DIGITS = 6


@dataclass(slots=True)
class Passed:
    """Lines that were passed over, counted by reason, with the first place of each.

    Args:
        is_strict: refuse the first such line instead.
        is_logged: log a warning when a log has been read.
        is_checked: look for texts that the readers left unread.
    """

    is_strict: bool = False
    is_logged: bool = False
    is_checked: bool = True
    reasons: Counter[str] = field(default_factory=Counter)
    places: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the formats that were read do not say, and in which order calls are."""
    warnings: list[str] = field(default_factory=list)
    """What may make the counts wrong: calls that were left out, and texts."""
    unread: Unread = field(default_factory=Unread)

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
        """What was passed over or left out, in a sentence; None if nothing was."""
        return "; ".join([*([self._lines()] if self.reasons else []), *self.warnings]) or None

    def _lines(self) -> str:
        named = [
            f"{num:,} {reason} (first {self.places[reason]})" for reason, num in self.reasons.most_common(_MAX_REASONS)
        ]
        more = len(self.reasons) - len(named)
        rest = f"; {more} more reasons" if more else ""
        total = self.reasons.total()
        return f"passed over {total:,} line{'s' * (total > 1)}: {'; '.join(named)}{rest} (--strict refuses them)"


def read_logs(
    paths: Iterable[Path], source: str, root: Path, passed: Passed, reader: CustomReader | None = None
) -> Iterator[Session]:
    """Yield the sessions of log files: recorded sessions and trajectories as they come, then the grouped requests.

    Requests with one session id are calls of one session, whichever files they are from. A line without an id is a
    session of its own.

    Args:
        paths: the files.
        source: what the sessions are said to be from.
        root: folder that names of sessions are relative to.
        passed: notes what is passed over.
        reader: reads the files; without one their formats are recognised.

    Raises:
        TraceError: a file cannot be read or would be counted wrongly, or has lines and not one that can be read.
    """
    paths = list(paths)
    files, order = _ordered(paths, has_times=reader is None)
    grouping, reading = Grouping(), _Reading(root, len(paths) == 1, passed, reader)
    num_read = num_sessions = 0
    for name, one in reading.calls(files):
        num_read += 1
        if isinstance(one, Session):
            num_sessions += 1
            yield one
        else:
            grouping.add(one, one.session or name)
    if not num_read and (reading.num_lines or passed.reasons):
        raise _nothing(paths[0], passed)
    if num_read and not num_sessions and not grouping.num_requests:
        raise TraceError(f"{paths[0]}: all {num_read:,} calls in it were answered with an error (HTTP 4xx or 5xx)")
    passed.warnings += _left_out(grouping, passed)
    if grouping.num_requests > 1:
        times, lines = "their recorded times", f"{order}lines, because not all have recorded times"
        passed.notes.append(f"calls are in the order of {times if grouping.has_times else lines}")
    yield from grouping.sessions(source)
    if passed.is_logged and (summary := passed.summary()):
        _logger.warning("%s: %s", source, summary)


@dataclass(slots=True)
class _Reading:
    """Reads files; readers and what they remember live as long as their files belong together."""

    root: Path
    is_one: bool
    passed: Passed
    reader: CustomReader | None
    num_lines: int = 0
    _again: list[Line] = field(default_factory=list)
    _readers: dict[type[Reader], Reader] = field(default_factory=dict)
    _envelopes: Envelopes = field(default_factory=Envelopes)

    def calls(self, files: list[list[Path]]) -> Iterator[tuple[str, Request | Session]]:
        """What the files have, each with a name for the session of a request that names none."""
        for family in files:
            for path in family:
                self._envelopes = Envelopes()
                for line in self._lines(path):
                    self.num_lines += 1
                    yield from self._taken(line)
            # A log may have its newest lines first: then a response is named before it comes.
            for line in reversed(self._again) if family is files[-1] else ():
                yield from self._taken(line, depth=0)
            for kind in [kind for kind in self._readers if kind.is_per_file or family is files[-1]]:
                yield from ((family[0].name, one) for one in self._readers.pop(kind).end())

    def _lines(self, path: Path) -> Iterator[Line]:
        """The lines of a file, up to where it is damaged."""
        try:
            yield from read_lines(path) if self.reader is None else self.reader.calls(path)
        except LineError as error:
            self.passed.add(error)

    def _taken(self, line: Line, depth: int = _MAX_ENVELOPES) -> Iterator[tuple[str, Request | Session]]:
        kind = next((kind for kind in READERS if kind.recognizes(line)), None)
        if kind is None and depth and (inner := self._envelopes.unwrap(line)) is not None:
            for key in self._envelopes.others:
                self.passed.add(line.error(f"`{key}` is a second list of records, which is not read; write one a line"))
            for one in inner:
                yield from self._taken(one, depth - 1)
            return
        try:
            name = "line" if self.is_one else f"{line.path.relative_to(self.root)}"
            yield from ((f"{name}-{line.number:06d}{line.inside}", one) for one in self._read(line, kind))
        except LineError as error:
            if kind is Responses and depth:
                self._again.append(line)
            # A server writes other lines, too, between the requests that it logs.
            elif error.reason != NO_JSON or not (SGLangLog in self._readers or self._envelopes.has_text):
                self.passed.add(error)

    def _read(self, line: Line, kind: type[Reader] | None) -> Iterator[Request | Session]:
        if kind is None:
            raise line.error(refusal(line))
        if kind not in self._readers:
            self._readers[kind] = kind()
            if kind.note and kind.note not in self.passed.notes:
                self.passed.notes.append(kind.note)
        for one in self._readers[kind].take(line):
            if isinstance(one, Request):
                one.at = one.at or line.at
            if self.passed.is_checked:
                # Of other formats a line may have several calls.
                around = line.value if kind in (Chat, Responses) or isinstance(one, Session) else {}
                self.passed.unread.add(one if isinstance(one, Request) else _as_request(one), around)
            yield one


def _ordered(paths: list[Path], *, has_times: bool) -> tuple[list[list[Path]], str]:
    """The files of each log, a rotated one's oldest first, the logs by their first times, and words for that order."""
    families: dict[str, list[Path]] = {}
    for path in paths:
        families.setdefault(ROTATED.sub("", str(path)), []).append(path)
    if len(paths) == 1:
        return [paths], ""
    times = {path: first_time(read_first_bytes(path, _HEAD_BYTES)) if has_times else None for path in paths}
    if None not in times.values():
        for family in families.values():
            family.sort(key=lambda path: (times[path] or 0, _age(path)))
        return sorted(families.values(), key=lambda family: times[family[0]] or 0), "files (by their first times) and "
    return [sorted(family, key=_age) for family in families.values()], "files (by name, rotated ones first) and "


def _age(path: Path) -> tuple[bool, int, str]:
    """What sorts the files of a rotated log, the oldest first: `log.2`, `log.1`, `log`, or `log.2026-11-25`, `log`."""
    found = ROTATED.search(str(path))
    suffix = ((found and found[1]) or "").strip(".")
    is_count = suffix.isdigit() and len(suffix) < _DATE_DIGITS
    return not suffix, -int(suffix) if is_count else 0, suffix


def _left_out(grouping: Grouping, passed: Passed) -> Iterator[str]:
    """What of the requests does not count."""
    for num, what in (
        (grouping.num_refused, "answered with an error (HTTP 4xx or 5xx)"),
        (grouping.num_doubled, "recorded before (same messages, same id or time)"),
    ):
        if num:
            yield f"left out {num:,} call{'s' * (num > 1)} that {'were' if num > 1 else 'was'} {what}"
    if found := passed.unread.summary():
        yield found


def _as_request(session: Session) -> Request:
    """All of a session as one request, to find what of its line was left unread."""
    tools = [tool for spec in session.specs[:1] for tool in spec.tools or []]
    return Request(messages=session.pool, tools=tools, body={"messages": [*session.pool]})


def _nothing(path: Path, passed: Passed) -> TraceError:
    """Why nothing at all could be read."""
    reasons = sorted(passed.reasons, key=lambda reason: (reason == NO_JSON, reason == NO_MODEL))
    if not reasons:
        return TraceError(f"{path}: a log without one call in it")
    return LineError(passed.places[reasons[0]], reasons[0])
