"""SGLang's own log of a server with `--log-requests`, as JSON or as text; other lines of the server between."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pic_traces.errors import TraceError
from pic_traces.formats.bodies import as_object, as_objects, prompt_tokens_of, was_refused
from pic_traces.formats.chat import request_of
from pic_traces.formats.reader import Dict, Reader, Request, conversation_of
from pic_traces.formats.responses import Responses
from pic_traces.formats.times import parse_time, time_of
from pic_traces.lines import Line, is_json
from pic_traces.session import JsonValue

_LEVEL = "SGLang cut its texts to 2,048 characters; record again with --log-requests-level 3"
_CUT_LEN = 2048
_JSON = re.compile(r'[^"{]*(\{"timestamp": ?".*)', re.DOTALL)
_TEXT = re.compile(r".{0,200}?\b(Receive OpenAI|Receive|Finish): obj=(.*)", re.DOTALL)
_RID = re.compile(r"\brid='([^']*)'")
_MAX_TEXT_CHARS = 1 << 24
_SAMPLE_CHARS = 400
_PLAIN = re.compile(r"[^\\'\"\n\r\t]+")


@dataclass(slots=True)
class _Event:
    kind: str
    """`openai`: a body as it arrived; `received`: the same as tokens; `finished`: with its answer."""
    rid: str = ""
    body: Dict = field(default_factory=dict)
    prompt: str = ""
    out: Dict = field(default_factory=dict)
    at: int | None = None


class SGLangLog(Reader):
    """Implements `Reader`. A body has no id: it belongs to the next request received, if its last text is in there."""

    name = "SGLang's request log (--log-requests)"
    is_per_file = False

    def __init__(self) -> None:
        self._bodies: deque[tuple[Line, Dict]] = deque()
        self._running: dict[str, tuple[Line, Dict]] = {}
        self._responses = Responses()

    @staticmethod
    def recognizes(line: Line) -> bool:
        if line.text:
            return bool(_TEXT.match(line.text) or _JSON.match(line.text))
        return str(line.value.get("event", "")).startswith("request.") and "obj" in line.value

    def take(self, line: Line) -> Iterator[Request]:
        event = _from_json(line) or _from_text(line)
        if event.kind == "openai":
            self._bodies.append((line._replace(at=event.at or parse_time(line.text) or line.at), event.body))
        elif event.kind == "received":
            if self._bodies:
                self._running[event.rid] = self._bodies.popleft()
        elif event.rid in self._running:
            where, body = self._running.pop(event.rid)
            yield from self._request(where, body, event if _is_of(body, event.prompt) else None)

    def end(self) -> Iterator[Request]:
        """Requests that had not finished."""
        left = [*self._running.values(), *self._bodies]
        self._running.clear()
        self._bodies.clear()
        for line, body in left:
            yield from self._request(line, body, None)

    def _request(self, line: Line, body: Dict, finished: _Event | None) -> Iterator[Request]:
        answer = finished.out.get("text") if finished else None
        if "messages" in body:
            request = request_of(line._replace(value={}), body, answer if isinstance(answer, str) else None)
        elif Responses.recognizes(line._replace(value=body)):
            (request,) = self._responses.take(line._replace(value=body))
        else:
            raise line.error("a request of another endpoint than chat completions, Messages and Responses")
        meta = as_object(finished.out.get("meta_info")) if finished else {}
        request.prompt_tokens = prompt_tokens_of(meta)
        request.is_refused = was_refused(meta.get("finish_reason"))
        request.at = line.at
        request.session = request.session or conversation_of(request.messages)
        yield request


def _from_json(line: Line) -> _Event | None:
    value = line.value
    if line.text:
        found = _JSON.match(line.text)
        value = as_object(found[1]) if found else {}
    event, body = str(value.get("event", "")), as_object(value.get("obj"))
    if not event.startswith("request."):
        return None
    if event == "request.received.openai":
        if _is_cut(body):
            raise TraceError(f"{line.path}{line.place}: {_LEVEL}")
        return _Event("openai", body=body, at=time_of(value))
    kind = "finished" if event == "request.finished" else "received"
    return _Event(kind, str(value.get("rid")), prompt=str(body.get("text") or ""), out=as_object(value.get("out")))


def _from_text(line: Line) -> _Event:
    found = _TEXT.match(line.text)
    if found is None or len(line.text) > _MAX_TEXT_CHARS:
        raise line.error("a line of SGLang's log that is damaged")
    what, rest = found.groups()
    rid = _RID.search(rest)
    if what == "Receive OpenAI":
        return _Event("openai", body=_literal(line, rest))
    if what == "Receive" or ", out={" not in rest:
        return _Event("received", rid[1] if rid else "")
    prompt, _, out = rest.rpartition(", out={")
    return _Event("finished", rid[1] if rid else "", prompt=prompt, out=_literal(line, f"{{{out}"))


def _literal(line: Line, text: str) -> Dict:
    """A dictionary as Python writes it, up to its end; headers may follow."""
    text = re.sub(r"\}, headers=\{[^{}]*\}$", "}", text)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        if "' ... '" in text or "] ... [" in text or '" ... "' in text:
            raise TraceError(f"{line.path}{line.place}: {_LEVEL}") from error
        raise line.error("a line of SGLang's log that is damaged") from error
    if not is_json(value):
        raise line.error("a line of SGLang's log with half a character, which no server takes")
    return value if isinstance(value, dict) else {}


def _is_cut(value: JsonValue) -> bool:
    if isinstance(value, str):
        half = _CUT_LEN // 2
        return len(value) == _CUT_LEN + 3 and value[half : half + 3] == "..."
    if isinstance(value, list):
        return (len(value) == _CUT_LEN + 1 and value[_CUT_LEN // 2] == "...") or any(map(_is_cut, value))
    return isinstance(value, dict) and any(map(_is_cut, value.values()))


def _is_of(body: Dict, prompt: str) -> bool:
    """Whether a prompt that was logged beside an answer is of this body; also where the log has no prompt."""
    texts = [text for message in as_objects(body.get("messages")) if isinstance(text := message.get("content"), str)]
    if not prompt or not texts:
        return True
    # The prompt may be written as Python writes a string: only a piece without escapes is equal in both.
    piece = max(_PLAIN.findall(texts[-1][-_SAMPLE_CHARS:]), key=len, default="")
    return piece in prompt
