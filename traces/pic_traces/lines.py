"""JSON files, gzip or plain, one JSON object at a time, with errors that name file and place."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, NamedTuple, TypeVar, cast

import msgspec

from pic_traces.errors import TraceError
from pic_traces.session import JsonValue

__all__ = ["JSON_SUFFIXES", "LINES_SUFFIXES", "Form", "Line", "read_first_bytes", "read_lines", "read_objects"]

LINES_SUFFIXES = (".jsonl", ".jsonl.gz")
"""Names of files with one JSON object a line."""
JSON_SUFFIXES = (".json", ".json.gz")
"""Names of files with one JSON object, or a list of them, over as many lines as they take."""

T = TypeVar("T")

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Form(Enum):
    """How an object stands in its file."""

    LINE = "line"
    ITEM = "item"
    WHOLE = "file"


class Line(NamedTuple):
    """One JSON object of a file and where it stands: `number` counts lines, or items of a list, from 1."""

    path: Path
    number: int
    value: dict[str, JsonValue]
    form: Form = Form.LINE

    def error(self, what: str) -> TraceError:
        """A `TraceError` that names this place."""
        place = {Form.LINE: f":{self.number}", Form.ITEM: f": item {self.number}", Form.WHOLE: ""}[self.form]
        return TraceError(f"{self.path}{place}: {what}")

    def convert(self, kind: type[T], what: str) -> T:
        """The object as a struct; raises a `TraceError` that names this place where it is none."""
        try:
            return msgspec.convert(self.value, kind)
        except msgspec.ValidationError as error:
            raise self.error(f"not a {what}: {error}") from error


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


def read_objects(path: Path) -> Iterator[Line]:
    """Yield the JSON objects of a file by its name: `.json` (or `.json.gz`) is one object or a list of objects.

    A file of any other name is read as JSONL, and so is a `.json` file whose first line is an object and not all.

    Raises:
        TraceError: the file cannot be read, or is not JSON, or holds something else than objects.
    """
    if not path.name.endswith(JSON_SUFFIXES):
        return read_lines(path)
    with _readable(path), _open(path) as file:
        raw = file.read().removeprefix(_BYTE_ORDER_MARK)
    if not raw.strip():
        return iter(())
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if _is_object(raw.lstrip().partition(b"\n")[0]):
            return read_lines(path)
        raise TraceError(f"{path}: bad JSON: {error}; a .json file is one JSON object or a list of them") from error
    return _items(path, value)


def read_first_bytes(path: Path, num_bytes: int) -> bytes:
    """The first bytes of a file's content, unpacked.

    Raises:
        TraceError: the file cannot be read.
    """
    with _readable(path), _open(path) as file:
        return file.read(num_bytes).removeprefix(_BYTE_ORDER_MARK)


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


def _items(path: Path, value: JsonValue) -> Iterator[Line]:
    if isinstance(value, dict):
        yield Line(path, 1, value, Form.WHOLE)
        return
    if not isinstance(value, list):
        raise TraceError(f"{path}: {type(value).__name__} instead of a JSON object or a list of them")
    for number, item in enumerate(value, start=1):
        if not isinstance(item, dict):
            raise TraceError(f"{path}: item {number}: {type(item).__name__} instead of a JSON object")
        yield Line(path, number, item, Form.ITEM)


def _is_object(raw: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(raw), dict)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _decode(path: Path, number: int, raw: bytes) -> dict[str, JsonValue]:
    place = Line(path, number, {})
    try:
        value = msgspec.json.decode(raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise place.error(f"bad JSON: {error}; a trace is JSONL, one JSON object a line (gzip or plain)") from error
    if not isinstance(value, dict):
        raise place.error(f"{type(value).__name__} instead of a JSON object; a trace is JSONL")
    return value
