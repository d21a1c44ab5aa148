"""JSON files, gzip or plain, one JSON object at a time, with errors that name file and place."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, cast

import msgspec

from pic_traces.errors import TraceError
from pic_traces.session import JsonValue, T

LINES_SUFFIXES = (".jsonl", ".jsonl.gz")
"""Names of files with one JSON object a line."""
JSON_SUFFIXES = (".json", ".json.gz")
"""Names of files with one JSON object, or a list of them, over as many lines as they take."""

_MAX_LINE_BYTES = 1 << 26
# A file that is one JSON text is decoded as a whole, which takes several times its size.
_MAX_JSON_BYTES = 1 << 29

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# msgspec gives up on JSON that is nested hundreds of levels deep.
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Line(NamedTuple):
    """One JSON object of a file: `number` counts lines, or items of a list, from 1; `place` says it for messages."""

    path: Path
    number: int
    place: str
    value: dict[str, JsonValue]

    def error(self, what: str) -> TraceError:
        """A `TraceError` that names this place."""
        return TraceError(f"{self.path}{self.place}: {what}")

    def convert(self, kind: type[T], what: str) -> T:
        """The object as a struct; raises a `TraceError` that names this place where it is none."""
        try:
            return msgspec.convert(self.value, kind)
        except (msgspec.ValidationError, RecursionError) as error:
            raise self.error(f"not a {what}: {error}") from error


def read_objects(path: Path) -> Iterator[Line]:
    """Yield the JSON objects of a file by its name: `.json` (or `.json.gz`) is one object or a list of objects.

    A file of any other name is read as JSONL, and so is a `.json` file whose first line alone is an object. Blank lines
    are skipped; gzip is recognised by its first bytes.

    Raises:
        TraceError: the file cannot be read, or is not JSON, or holds something else than objects.
    """
    if not path.name.endswith(JSON_SUFFIXES):
        return _read_lines(path)
    with _readable(path), _open(path) as file:
        raw = file.read(_MAX_JSON_BYTES + 1).removeprefix(_BYTE_ORDER_MARK)
    if len(raw) > _MAX_JSON_BYTES:
        raise TraceError(
            f"{path}: more than {_MAX_JSON_BYTES >> 20} MiB of JSON, unpacked; write one object a line, as .jsonl"
        )
    if not raw.strip():
        return iter(())
    try:
        value = msgspec.json.decode(raw)
    except _NOT_JSON as error:
        if _is_object(raw.lstrip().partition(b"\n")[0]):
            return _read_lines(path)
        raise TraceError(f"{path}: bad JSON: {error}; a .json file is one JSON object or a list of them") from error
    return _items(path, value)


def read_first_bytes(path: Path, num_bytes: int) -> bytes:
    """The first bytes of a file's content, unpacked.

    Raises:
        TraceError: the file cannot be read.
    """
    with _readable(path), _open(path) as file:
        return file.read(num_bytes).removeprefix(_BYTE_ORDER_MARK)


def _read_lines(path: Path) -> Iterator[Line]:
    number = 0
    try:
        with _open(path) as file:
            for number, raw in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), start=1):
                if len(raw) > _MAX_LINE_BYTES:
                    raise TraceError(
                        f"{path}:{number}: a line of more than {_MAX_LINE_BYTES >> 20} MiB, unpacked; split the "
                        "session, or put each call on a line of its own"
                    )
                if raw.strip():
                    yield _line(path, number, raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw)
    except (OSError, EOFError, zlib.error) as error:
        where = f"{path}" if number == 0 else f"{path}: after line {number}"
        raise TraceError(f"{where}: cannot be read: {error}") from error


def _line(path: Path, number: int, raw: bytes) -> Line:
    try:
        value = msgspec.json.decode(raw)
    except _NOT_JSON as error:
        what = f"bad JSON: {error}; a trace is JSONL, one JSON object a line (gzip or plain)"
        raise TraceError(f"{path}:{number}: {what}") from error
    if not isinstance(value, dict):
        raise TraceError(f"{path}:{number}: {type(value).__name__} instead of a JSON object; a trace is JSONL")
    return Line(path, number, f":{number}", value)


def _items(path: Path, value: JsonValue) -> Iterator[Line]:
    if isinstance(value, dict):
        yield Line(path, 1, "", value)
        return
    if not isinstance(value, list):
        raise TraceError(f"{path}: {type(value).__name__} instead of a JSON object or a list of them")
    for number, item in enumerate(value, start=1):
        if not isinstance(item, dict):
            raise TraceError(f"{path}: item {number}: {type(item).__name__} instead of a JSON object")
        yield Line(path, number, f": item {number}", item)


def _is_object(raw: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(raw), dict)
    except _NOT_JSON:
        return False


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        magic = file.read(2)
    return cast("IO[bytes]", gzip.open(path, "rb")) if magic == _GZIP_MAGIC else path.open("rb")
