"""Reading JSONL files, gzip or plain, one JSON object at a time, with errors that name file and line.

Must not know what the objects mean.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, cast

import msgspec

from pic_traces.session import JsonValue
from sglang_pic.errors import TraceError

__all__ = ["Line", "read_lines"]

_GZIP_MAGIC = b"\x1f\x8b"


class Line(NamedTuple):
    """One JSON object of a file and where it stands (`number` counts from 1)."""

    path: Path
    number: int
    value: dict[str, JsonValue]

    def error(self, what: str) -> TraceError:
        """A `TraceError` that names this line."""
        return TraceError(f"{self.path}:{self.number}: {what}")


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the JSON objects of a JSONL file; blank lines are passed over, gzip is recognised by its first bytes.

    Raises:
        TraceError: the file cannot be read, or a line is not one JSON object.
    """
    number = 0
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield Line(path, number, _decode(path, number, raw))
    except (OSError, EOFError, zlib.error) as error:
        where = f"{path}" if number == 0 else f"{path}: after line {number}"
        raise TraceError(f"{where}: cannot be read: {error}") from error


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        magic = file.read(2)
    return cast("IO[bytes]", gzip.open(path, "rb")) if magic == _GZIP_MAGIC else path.open("rb")


def _decode(path: Path, number: int, raw: bytes) -> dict[str, JsonValue]:
    if number == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path}:{number}: bad JSON: {error}; a trace is JSONL, one JSON object a line (gzip or plain)"
        ) from error
    if not isinstance(value, dict):
        raise TraceError(f"{path}:{number}: {type(value).__name__} instead of a JSON object; a trace is JSONL")
    return value
