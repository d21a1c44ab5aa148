"""What log shippers put around lines: Docker, Kubernetes, Loki, Elastic, the clouds' loggers, and text before JSON.

A line that no reader takes is unwrapped once more: a list of records becomes lines, a text becomes the line that it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress

from pic_traces.formats.bodies import as_object, as_objects
from pic_traces.formats.reader import Dict
from pic_traces.formats.times import parse_time, time_of
from pic_traces.lines import Line, is_json
from pic_traces.session import JsonValue

_LISTS = (
    "hits", "data", "result", "results", "values", "events", "logEvents", "records", "rows", "items", "entries", "logs",
    "observations", "traces", "runs", "spans", "calls", "requests",
)  # fmt: skip
"""Fields with a list of records: Elastic's answer, Loki's, CloudWatch's, exports of tracers."""
_INNER = ("_source", "fields", "jsonPayload", "protoPayload", "result", "data", "hits", "attributes", "content")
"""Fields with one record, or with one of the lists."""
_TEXTS = ("log", "message", "msg", "@message", "line", "MESSAGE", "textPayload", "_raw", "event", "body", "original")
"""Fields with a line as it was written."""
_PARTIAL = re.compile(r"\S+ (?:stdout|stderr) ([PF]) (.*)", re.DOTALL)
_JSON = re.compile(r'\{\s*"')
_DECODER = json.JSONDecoder(strict=False)
_DOCKERS_MAX_BYTES = 1 << 14


class Envelopes:
    """Unwraps the lines of a file; it keeps the beginning of a line that a shipper cut in pieces."""

    def __init__(self) -> None:
        self._begun: dict[str, str] = {}
        self.has_text = False
        """Whether JSON was found behind text: then lines of text without any are no fault."""
        self.others: list[str] = []
        """Further lists in the line that was unwrapped; they may have the same calls again (traces, spans)."""
        self._is_begun = False

    def unwrap(self, line: Line) -> list[Line] | None:
        """The lines in a line: none if it is the beginning of a cut line; None if there is no envelope."""
        self.others = []
        found = list(self._in_text(line) if line.text else self._in_value(line))
        return found if found or self._is_begun else None

    def _in_value(self, line: Line) -> Iterator[Line]:
        value = line.value
        self._is_begun = False
        at = time_of(value) or line.at
        lists = _lists(value)
        self.others = [*lists][1:]
        for number, record in enumerate(next(iter(lists.values()), ()), start=1):
            one = line._replace(place=f"{line.place}: item {number}", inside=f"{line.inside}-{number}")
            # Loki's values are pairs of a time and a line.
            if isinstance(record, list) and len(record) > 1 and isinstance(record[1], str):
                yield _line_of(one, record[1], parse_time(record[0]))
            elif isinstance(record, dict):
                yield one._replace(value=record, at=time_of(record) or at)
        if lists:
            return
        text = next((value[key] for key in _TEXTS if isinstance(value.get(key), str)), None)
        if isinstance(text, str):
            stream = str(value.get("stream", ""))
            whole = self._begun.pop(stream, "") + text
            # Docker cuts long lines: all pieces but the last lack the line's end. Others leave out all line ends.
            if "log" in value and not text.endswith("\n") and len(text.encode()) >= _DOCKERS_MAX_BYTES:
                self._begun[stream], self._is_begun = whole, True
            elif "{" in whole:
                yield _line_of(line, whole, at)
            return
        for key in _INNER:
            if inner := as_object(value.get(key)):
                yield line._replace(value=inner, at=time_of(inner) or at)
                return

    def _in_text(self, line: Line) -> Iterator[Line]:
        """The JSON behind the text of a line, or the rest of one that Kubernetes cut."""
        text = line.text
        self._is_begun = False
        if found := _PARTIAL.fullmatch(text):
            whole = self._begun.pop("", "") + found[2]
            if found[1] == "P":
                self._begun[""], self._is_begun = whole, True
            else:
                yield _line_of(line, whole, parse_time(text))
            return
        # In a line that is cut, an object further in is no request.
        if (begin := _JSON.search(text)) is None or not text[: begin.start()].strip(" [,"):
            return
        with suppress(ValueError, RecursionError):
            value, _ = _DECODER.raw_decode(text, begin.start())
            self.has_text = True
            at, value = time_of(value) or parse_time(text) or line.at, value if is_json(value) else {}
            yield line._replace(value=value, text="" if value else text[begin.start() :], at=at)


def _lists(value: Dict) -> dict[str, list[JsonValue]]:
    """The lists of records that an object is about, by name."""
    lists = {key: found for key in _LISTS if isinstance(found := value.get(key), list) and found}
    return {key: found for key, found in lists.items() if as_objects(found) or isinstance(found[0], list)}


def _line_of(line: Line, text: str, at: int | None) -> Line:
    value = as_object(text)
    return line._replace(value=value, text="" if value else text.rstrip("\r\n"), at=at)
