"""When a call was recorded, wherever and however a log writes it."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime

from pic_traces.formats.bodies import as_objects
from pic_traces.session import JsonValue

# Names of fields with a time: of a start before others, never of an end or a duration.
_NAMES = tuple(
    re.compile(name, re.IGNORECASE) for name in ("start", r"timestamp|date|creat|^@?time$|^ts$|_at$", "time")
)
_ENDS = re.compile(
    "end|finish|complete|update|modif|expir|last|first|elapsed|duration|latency|taken|(response|total).?time",
    re.IGNORECASE,
)
_DATE = re.compile(
    r"(\d{4})[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?\d*\s?(Z|UTC|[+-]\d\d:?\d\d)?"
)
_PAIR = re.compile(r'"(@?\w*(?:start|time|date|creat|_at|ts)\w*)\\*"\s*:\s*\\*"?([^"\\,}]+)', re.IGNORECASE)
_FIRST_S, _LAST_S = 10**8, 10**11
"""Seconds since 1970 that are a time of this age; smaller numbers are durations, or count from a start."""
_TEXT_CHARS = 80


def time_of(*holders: JsonValue) -> int | None:
    """The first time in these objects, in nanoseconds since 1970; None if none has one."""
    for holder in as_objects([*holders]):
        for name in _NAMES:
            for key, value in holder.items():
                if name.search(key) and not _ENDS.search(key) and (found := parse_time(value)) is not None:
                    return found
    return None


def parse_time(value: JsonValue) -> int | None:
    """A time in nanoseconds, of a date (UTC, unless it says) or of any unit since 1970; None if it is none."""
    if isinstance(value, str):
        if found := _DATE.search(value[:_TEXT_CHARS]):
            *numbers, fraction, zone = found.groups()
            with suppress(ValueError):
                hours = zone if zone and zone[0] in "+-" else "+0000"
                at = datetime.strptime("".join(numbers) + hours.replace(":", ""), "%Y%m%d%H%M%S%z").astimezone(UTC)
                return int(at.timestamp()) * 10**9 + int((fraction or "").ljust(9, "0") or 0)
            return None
        with suppress(ValueError):
            return parse_time(int(value) if value.isdigit() else float(value))
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not _FIRST_S <= value < _LAST_S * 10**9:
        return None
    scale = next(power for power in (9, 6, 3, 0) if value < _LAST_S * 10 ** (9 - power))
    return int(value * 10**scale)


def first_time(head: bytes) -> int | None:
    """The first time in the beginning of a file: in front of a line, or a field of one of the names above."""
    for row in head.decode(errors="replace").splitlines():
        if not row.lstrip().startswith(("{", "[{")) and (at := parse_time(row)) is not None:
            return at
        for found in _PAIR.finditer(row):
            if not _ENDS.search(found[1]) and (at := parse_time(found[2])) is not None:
                return at
    return None
