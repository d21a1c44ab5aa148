"""What a reader of a log format is, what it hands on, and how requests become sessions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import ClassVar, cast

import msgspec

from pic_traces.errors import TraceError
from pic_traces.lines import Line
from pic_traces.session import CallSpec, JsonValue, Message, Session, T, spans_of

_MAX_HELD_BYTES = 1 << 32
"""Distinct messages of a log, as JSON: a log is held until its last line is grouped."""

Dict = dict[str, JsonValue]


class Request(msgspec.Struct, kw_only=True):
    """One recorded call in OpenAI's form, whatever API it was recorded from.

    Args:
        session: what calls of one conversation have in common; None where the log does not say.
        prompt_tokens: as recorded.
    """

    messages: list[Message]
    answer: Message | None = None
    tools: list[JsonValue] | None = None
    options: Dict = {}
    session: str | None = None
    prompt_tokens: int | None = None


class Reader:
    """Reads one format. An instance reads line by line in order, and may remember what it has read."""

    name: ClassVar[str]
    """What a line of this format is called in messages, in the plural."""
    note: ClassVar[str] = ""
    """What this format does not say, for reports."""
    is_per_file: ClassVar[bool] = True
    """Whether each file of a folder begins anew."""

    @staticmethod
    def recognizes(line: Line) -> bool:
        """Whether a line is of this format, well-formed or not."""
        raise NotImplementedError

    def take(self, line: Line) -> Iterator[Request | Session]:
        """What is complete with this line.

        Raises:
            LineError: the line is damaged, or has nothing to count; other lines may be good.
            TraceError: the whole log would be counted wrongly.
        """
        raise NotImplementedError

    def end(self) -> Iterator[Request | Session]:
        """What is complete when the file has ended."""
        return iter(())


class Conversation:
    """The messages of a session that are read one by one, and its calls.

    Args:
        session_id: of the session.
    """

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.pool: list[Message] = []
        self.specs: list[CallSpec] = []

    def add(self, message: Message) -> int:
        """Put a message into the pool; its index."""
        self.pool.append(message)
        return len(self.pool) - 1

    def call(
        self,
        prompt: Iterable[int],
        answer: int,
        *,
        tools: list[JsonValue] | None = None,
        agent: str | None = None,
        prompt_tokens: int | None = None,
    ) -> None:
        """Note a call: the indices of its prompt's messages, and of its answer. A call without messages is left out."""
        if spans := spans_of(prompt):
            self.specs.append(
                CallSpec(spans=spans, completion=answer, tools=tools, agent=agent, prompt_tokens=prompt_tokens)
            )

    def session(self, source: str) -> Session:
        """The session so far."""
        return Session(session_id=self.session_id, source=source, pool=self.pool, specs=self.specs)


class Grouping:
    """Requests put together to sessions, in the order of their first lines; equal messages and tools are held once."""

    def __init__(self) -> None:
        self._groups: dict[str, list[Request]] = {}
        self._seen: dict[bytes, JsonValue] = {}
        self._num_bytes = 0

    def add(self, request: Request, session_id: str) -> None:
        """Take a request of a session.

        Raises:
            TraceError: the distinct messages of all requests take more than 4 GiB.
        """
        request.messages = [self._share(message) for message in request.messages]
        if request.tools is not None:
            request.tools = self._share(request.tools)
        self._groups.setdefault(session_id, []).append(request)

    def sessions(self, source: str) -> Iterator[Session]:
        """The sessions."""
        for session_id, requests in self._groups.items():
            yield _session(session_id, source, requests)

    def _share(self, value: T) -> T:
        encoded = msgspec.json.encode(value)
        digest = hashlib.blake2b(encoded, digest_size=16).digest()
        if digest not in self._seen:
            self._seen[digest] = cast("JsonValue", value)
            self._num_bytes += len(encoded)
            if self._num_bytes > _MAX_HELD_BYTES:
                raise TraceError("more than 4 GiB of distinct messages; read the log in parts, or use --limit-sessions")
        return cast("T", self._seen[digest])


def _session(session_id: str, source: str, requests: list[Request]) -> Session:
    pool: list[Message] = []
    specs: list[CallSpec] = []
    for request in requests:
        start = len(pool)
        pool += request.messages
        end = len(pool)
        if request.answer is not None:
            pool.append(request.answer)
        specs.append(
            CallSpec(
                spans=((start, end),),
                completion=None if request.answer is None else end,
                tools=request.tools or None,
                options=request.options,
                prompt_tokens=request.prompt_tokens,
            )
        )
    return Session(session_id=session_id, source=source, pool=pool, specs=specs)


def conversation_of(messages: list[Message]) -> str:
    """A name for requests that begin with the same user message, where a log names no sessions."""
    first = next((message for message in messages if message.get("role") == "user"), messages[0])
    return f"conversation-{hashlib.blake2b(msgspec.json.encode(first.get('content')), digest_size=6).hexdigest()}"
