"""HTTP exchanges that browsers, proxies and tests record: HAR files and VCR cassettes, with bodies of any API."""

from __future__ import annotations

import base64
from collections.abc import Iterator

from pic_traces.errors import LineError
from pic_traces.formats.bodies import as_object, as_objects
from pic_traces.formats.chat import Chat
from pic_traces.formats.reader import Dict, Reader, Request, conversation_of
from pic_traces.formats.responses import Responses
from pic_traces.formats.times import time_of
from pic_traces.lines import Line


class _Exchanges(Reader):
    """Reads the exchanges of calls of models, and leaves out all others."""

    note = "exchanges do not say which session a call is of: calls with the same first user message are one"

    def __init__(self) -> None:
        self._readers: tuple[Reader, ...] = (Chat(), Responses())

    def take(self, line: Line) -> Iterator[Request]:
        """The calls; a damaged one is refused after all others were given."""
        found, damaged = 0, list[LineError]()
        for exchange in self._exchanges(line.value):
            one = line._replace(value=exchange)
            reader = next((reader for reader in self._readers if reader.recognizes(one)), None)
            if reader is None:
                continue
            found += 1
            try:
                for request in reader.take(one):
                    assert isinstance(request, Request)
                    request.session = request.session or conversation_of(request.messages)
                    request.at = time_of(exchange)
                    yield request
            except LineError as error:
                damaged.append(error)
        if damaged:
            raise damaged[0]
        if not found:
            raise line.error("HTTP exchanges without a call of a model (a body with `messages` or `input`)")

    def _exchanges(self, value: Dict) -> list[Dict]:
        """Objects with a `request` and a `response`, whose bodies are where `find_body` and `find_answer` look."""
        raise NotImplementedError


class Har(_Exchanges):
    """Implements `Reader`."""

    name = "HAR files (`log.entries`)"

    @staticmethod
    def recognizes(line: Line) -> bool:
        return "entries" in as_object(line.value.get("log"))

    def _exchanges(self, value: Dict) -> list[Dict]:
        entries = as_objects(as_object(value["log"]).get("entries"))
        for entry in entries:
            content = as_object(as_object(entry.get("response")).get("content"))
            if content.get("encoding") == "base64":
                content["text"] = _decoded(str(content.get("text", "")))
        return entries


class Vcr(_Exchanges):
    """Implements `Reader`. Cassettes in YAML come as objects of one interaction each."""

    name = "VCR cassettes (`interactions`)"

    @staticmethod
    def recognizes(line: Line) -> bool:
        return bool({"interactions", "http_interactions"} & line.value.keys())

    def _exchanges(self, value: Dict) -> list[Dict]:
        return as_objects(value.get("interactions") or value.get("http_interactions"))


def _decoded(text: str) -> str:
    try:
        return base64.b64decode(text).decode(errors="replace")
    except ValueError:
        return ""
