"""Files of JSON objects or of log lines, gzip or plain, one at a time, with errors that name file and place."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, cast

import msgspec

from pic_traces.cassettes import CASSETTE, items_of, parse_item
from pic_traces.errors import LineError, TraceError
from pic_traces.session import JsonValue, T

SUFFIXES = (".jsonl", ".json", ".ndjson", ".log", ".traj", ".har", ".yaml", ".yml")
"""Names of files that are read of a folder, plain or packed (`.gz`, `.xz`, `.bz2`)."""
ROTATED = re.compile(r"(\.[\d_-]+)?(\.(gz|xz|bz2))?$")
"""What a server puts behind the name of a file that it has filled."""

# What a line or an object takes unpacked; decoded it takes up to 24 times that (empty objects, which nobody records).
_MAX_LINE_BYTES = 1 << 26
# A file that is one JSON text is held as text, and decoded item by item.
_MAX_JSON_BYTES = 1 << 29

_PACKED = ((b"\x1f\x8b", gzip.open), (b"\xfd7zXZ", lzma.open), (b"BZh", bz2.open))
_TAR = slice(257, 262), b"ustar"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# How formats begin that are no text, or no JSON, and what helps.
_OTHER_MAGIC = (
    (
        b"PK\x03\x04",
        "a zip archive (as inspect_ai's .eval)",
        "log the requests instead (bodies of /v1/chat/completions, one a line)",
    ),
    (b"\x80", "a pickle (as SGLang's --dump-requests-folder)", "record with --log-requests --log-requests-level 3"),
    (b"(\xb5/\xfd", "zstandard", "unpack it: zstd -d FILE"),
    (b"PAR1", "a parquet file", "write its rows as JSONL, or read it with --reader"),
    (b"SQLite format 3", "a SQLite database", "write its rows as JSONL, or read it with --reader"),
    ((b"\xff\xfe", b"\xfe\xff"), "UTF-16 text (PowerShell's `>`)", "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"),
)
# msgspec gives up on JSON that is nested hundreds of levels deep.
_NOT_JSON = (ValueError, RecursionError)
_FORMS = "a file is JSONL, one JSON object, or a list of them"
_DOCUMENT = re.compile(rb"\s*(?:\{|\[\s*[\[{\"\]])")
_BETWEEN_ITEMS = re.compile(r"[\s,]*")


class Line(NamedTuple):
    """One line or JSON object of a file: `number` counts lines, or items of a list, from 1."""

    path: Path
    number: int
    place: str
    """Where it stands in the file, for messages."""
    value: dict[str, JsonValue]
    text: str = ""
    """The line or item as it is, where it is no JSON object; then `value` is empty."""
    at: int | None = None
    """When it was written, in nanoseconds since 1970, as what was around it says."""
    inside: str = ""
    """Its number in a list of records that was around it, such as `-2`."""

    def error(self, what: str) -> LineError:
        """An error that names this place."""
        return LineError(f"{self.path}{self.place}", what)

    def convert(self, kind: type[T], what: str) -> T:
        """The object as a struct; raises a `LineError` that names this place where it is none."""
        try:
            return msgspec.convert(self.value, kind)
        except (msgspec.ValidationError, RecursionError) as error:
            raise self.error(f"not a {what}: {error}") from error


def read_lines(path: Path) -> Iterator[Line]:
    """Yield what a file holds: the objects of a JSON text (an object, or a list of them), or else line by line.

    The content decides, not the name. Blank lines are skipped; gzip is recognised by its first bytes. At most 512 MiB
    of text and one decoded object of at most 64 MiB are held at a time.

    Raises:
        LineError: the rest of the file is no JSON, or the file is of a format that is no text.
        TraceError: the file cannot be read, or is too large.
    """
    first = read_first_bytes(path, 1 << 16)
    for magic, what, remedy in _OTHER_MAGIC:
        if first.startswith(magic):
            raise LineError(f"{path}", f"{what}, which is not read; {remedy}")
    if first[_TAR[0]] == _TAR[1]:
        raise LineError(f"{path}", "a tar archive, which is not read; unpack it (tar xf FILE), and name its folder")
    if CASSETTE.match(first):
        yield from _read_cassette(path)
    elif _DOCUMENT.match(first) and not _begins_with_object(path):
        yield from _read_document(path)
    else:
        yield from _read_lines(path)


def read_objects(path: Path) -> Iterator[Line]:
    """Yield the JSON objects of a file; the same as `read_lines`, for files that must hold nothing else.

    Raises:
        TraceError: also where a line is no JSON object.
    """
    for line in read_lines(path):
        if line.text:
            raise line.error(what_is_wrong(line.text))
        yield line


def what_is_wrong(text: str) -> str:
    """Why a line is no JSON object."""
    try:
        value = msgspec.json.decode(text)
    except _NOT_JSON as error:
        return f"bad JSON: {error}; a trace is JSONL, one JSON object a line (gzip or plain)"
    return f"{type(value).__name__} instead of a JSON object; a trace is JSONL"


def is_json(value: object) -> bool:
    """Whether a value can be JSON: Python's readers also take half a character (`"\\ud83d"`), which no server does."""
    try:
        msgspec.json.encode(value)
    except (*_NOT_JSON, OverflowError, TypeError):
        return False
    return True


def read_first_bytes(path: Path, num_bytes: int) -> bytes:
    """The first bytes of a file's content, unpacked.

    Raises:
        TraceError: the file cannot be read.
    """
    with _readable(path), _open(path) as file:
        return file.read(num_bytes).removeprefix(_BYTE_ORDER_MARK)


def _begins_with_object(path: Path) -> bool:
    """Whether the first line alone is a JSON object, and others follow or the name says so: then the file is JSONL."""
    with _readable(path), _open(path) as file:
        first = b""
        while not first.strip() and (first := file.readline(_MAX_LINE_BYTES + 1)):
            pass
        first = first.removeprefix(_BYTE_ORDER_MARK)
        if len(first) > _MAX_LINE_BYTES or _object(first) is None:
            return False
        return ".json" not in path.suffixes or bool(file.read(1 << 16).strip())


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
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        where = f"{path}" if number == 0 else f"{path}: after line {number}"
        raise TraceError(f"{where}: cannot be read: {error}") from error


def _line(path: Path, number: int, raw: bytes) -> Line:
    value = _object(raw)
    if value is not None:
        return Line(path, number, f":{number}", value)
    return Line(path, number, f":{number}", {}, raw.decode(errors="replace").rstrip("\r\n"))


def _read_cassette(path: Path) -> Iterator[Line]:
    """The interactions of a VCR cassette in YAML, each parsed by itself and given as a cassette of its own."""
    with _readable(path), _open(path) as file:
        number = 1
        try:
            for item in items_of(file, _MAX_LINE_BYTES):
                value: dict[str, JsonValue] = {"interactions": [parse_item(item, _MAX_LINE_BYTES)]}
                yield Line(path, number, f": interaction {number}", value)
                number += 1
        except ValueError as error:
            raise LineError(f"{path}: interaction {number}", str(error)) from error


def _read_document(path: Path) -> Iterator[Line]:
    with _readable(path), _open(path) as file:
        raw = file.read(_MAX_JSON_BYTES + 1).removeprefix(_BYTE_ORDER_MARK)
    if len(raw) > _MAX_JSON_BYTES:
        raise TraceError(
            f"{path}: more than {_MAX_JSON_BYTES >> 20} MiB of JSON, unpacked; write one object a line, as .jsonl"
        )
    if raw.lstrip().startswith(b"["):
        yield from _items(path, raw.decode(errors="replace"))
        return
    if len(raw) > 2 * _MAX_LINE_BYTES:
        raise TraceError(f"{path}: one JSON object of more than {_MAX_LINE_BYTES >> 19} MiB; split it, as .jsonl")
    try:
        value = msgspec.json.decode(raw)
    except _NOT_JSON as error:
        # The first line of JSONL may be damaged; lines of a document that are objects by themselves are indented.
        if not any(row[:1] == b"{" and _object(row) for row in raw.splitlines()[1:]):
            raise LineError(f"{path}", f"bad JSON: {error}; {_FORMS}") from error
        yield from _read_lines(path)
        return
    yield Line(path, 1, "", value)


def _items(path: Path, text: str) -> Iterator[Line]:
    """The items of a list, each decoded when it is asked for."""
    decoder, number = json.JSONDecoder(strict=False), 0
    at = cast("re.Match[str]", _BETWEEN_ITEMS.match(text, text.index("[") + 1)).end()
    while not text.startswith("]", at):
        number += 1
        try:
            value, end = decoder.raw_decode(text, at)
        except _NOT_JSON as error:
            raise LineError(f"{path}: item {number}", f"bad JSON: {error}; {_FORMS}") from error
        is_object = isinstance(value, dict) and is_json(value)
        yield Line(path, number, f": item {number}", value if is_object else {}, "" if is_object else text[at:end])
        at = cast("re.Match[str]", _BETWEEN_ITEMS.match(text, end)).end()
    if rest := text[at + 1 :].strip():
        num = len(rest.splitlines())
        raise LineError(f"{path}: behind item {number}", f"{num:,} more line{'s' * (num > 1)} behind a list; {_FORMS}")


def _object(raw: bytes) -> dict[str, JsonValue] | None:
    try:
        value = msgspec.json.decode(raw)
    except _NOT_JSON:
        return None
    return value if isinstance(value, dict) else None


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        first = file.read(8)
    unpack = next((opener for magic, opener in _PACKED if first.startswith(magic)), None)
    return cast("IO[bytes]", unpack(path, "rb")) if unpack else path.open("rb")
