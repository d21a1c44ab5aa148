"""What a reader of a log format is, what it hands on, and how requests become sessions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
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
        body: what it was made of, to find what was left unread.
        at: when it was sent, in nanoseconds; None where the log does not say.
        mark: an id that only other records of this same call have, too.
        parent: the `mark` of what made this call; a parent with the same prompt is a record of the same call.
        is_refused: it was answered with an error.
    """

    messages: list[Message]
    answer: Message | None = None
    tools: list[JsonValue] | None = None
    options: Dict = {}
    session: str | None = None
    prompt_tokens: int | None = None
    body: Dict = {}
    at: int | None = None
    mark: str | None = None
    parent: str | None = None
    is_refused: bool = False


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
    """Requests put together to sessions; equal messages and tools are held once.

    Where all requests have a recorded time, they and their sessions are in the order of these, otherwise in the order
    in which they were read. Requests that were answered with an error, and second records of a call, are left out.
    """

    def __init__(self) -> None:
        self._requests: list[tuple[str, Request]] = []
        self._seen: dict[bytes, JsonValue] = {}
        self._records: dict[bytes, list[Request]] = {}
        self._num_bytes = 0
        self.num_refused = self.num_doubled = 0

    @property
    def has_times(self) -> bool:
        """Whether recorded times order the requests."""
        times = {request.at for _, request in self._requests}
        return None not in times

    @property
    def num_requests(self) -> int:
        """How many there are."""
        return len(self._requests)

    def add(self, request: Request, session_id: str) -> None:
        """Take a request of a session.

        Raises:
            TraceError: the distinct messages of all requests take more than 4 GiB.
        """
        if request.is_refused:
            self.num_refused += 1
            return
        request.messages, digest = self._shared(request.messages)
        if request.tools is not None:
            request.tools = self._share(request.tools)
        request.body = {}
        records = self._records.setdefault(digest, [])
        if same := next((other for other in records if _is_same_call(other, request)), None):
            self.num_doubled += 1
            same.answer = same.answer or request.answer
            same.prompt_tokens = same.prompt_tokens or request.prompt_tokens
            return
        records.append(request)
        self._requests.append((session_id, request))

    def sessions(self, source: str) -> Iterator[Session]:
        """The sessions, in the order of their first requests."""
        requests = self._requests
        if self.has_times:
            times = [request.at or 0 for _, request in requests]
            # Equal times keep their order, which is the other way round in a log that has the newest first.
            num_falling = sum(later < sooner for sooner, later in pairwise(times))
            is_newest_first = num_falling > sum(later > sooner for sooner, later in pairwise(times))
            requests = sorted(requests[::-1] if is_newest_first else requests, key=lambda one: one[1].at or 0)
        groups: dict[str, list[Request]] = {}
        for session_id, request in requests:
            groups.setdefault(session_id, []).append(request)
        for session_id, group in groups.items():
            yield _session(session_id, source, group)

    def _shared(self, messages: list[Message]) -> tuple[list[Message], bytes]:
        """The messages, equal ones as one object, and a digest of all."""
        digests = [self._digest(message) for message in messages]
        whole = hashlib.blake2b(b"".join(digests), digest_size=16).digest()
        return [cast("Message", self._seen[digest]) for digest in digests], whole

    def _share(self, value: T) -> T:
        return cast("T", self._seen[self._digest(cast("JsonValue", value))])

    def _digest(self, value: JsonValue) -> bytes:
        encoded = msgspec.json.encode(value)
        digest = hashlib.blake2b(encoded, digest_size=16).digest()
        if digest not in self._seen:
            self._seen[digest] = value
            self._num_bytes += len(encoded)
            if self._num_bytes > _MAX_HELD_BYTES:
                raise TraceError("more than 4 GiB of distinct messages; read the log in parts, or use --limit-sessions")
        return digest


def _is_same_call(first: Request, second: Request) -> bool:
    """Whether two requests with the same messages are records of one call."""
    if first.mark and second.mark:
        return first.mark in (second.mark, second.parent) or second.mark == first.parent
    # Calls of one second may be several; equal answers at one time are one answer.
    is_exact = first.at is not None and (first.answer is not None or first.at % 10**9 != 0)
    return is_exact and first.at == second.at and first.answer == second.answer


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
