"""Rewrites recorded requests so that their changing text comes last.

A harness can follow each of the `RULES`. No text is invented or omitted: text moves, or is sent as it was first sent.
Lines, objects and lists of objects stay whole, and what was JSON is JSON.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import msgspec
from pic_traces.session import Call, CallSpec, JsonValue, Message, Session

RULES = {
    "head": "text that differs between calls moves from the system prompt to the end of the last message, when it "
    "changed, and in prompts of one message to its end",
    "tools": "tools keep the order in which they were first sent, and new ones are appended",
    "keys": "keys of tool schemas and of results keep their order",
    "results": "results of parallel tool calls keep the order in which they were first sent",
    "history": "messages are sent back as they were first sent or generated: stamps, ids, spaces, escapes, roles",
}
"""What each rule changes, by its name."""

# A sentence of a line, or the rest of the line; joined they are the line.
_SENTENCE = re.compile(r"[^\n]*?[.!?](?= )\s|[^\n]*\n|[^\n]+")
_LINE_CHARS = 200
# Two system prompts are versions of one if they share so much of the shorter one's text, or differ in stamps alone.
_SAME_SHARE = 0.5
# Harnesses change these in messages that they send again: stamps in brackets, ids, numbers, white space.
_RESTAMPED = re.compile(r"\[[^\]\n]{0,80}\]|\b(?=[a-f-]*\d)[0-9a-f]{6,}(?:-[0-9a-f]{4,12})*\b|\d+|\s+")
# Lines that begin an item of a list, an object or a tag: deeper lines below them belong to them.
_ITEM = re.compile(r"\s*(?:[-*+|<{\[]|\d+[.)])|.*[:{\[(]\s*$")


@dataclass(slots=True, eq=False)
class _Head:
    """One system prompt in all its versions: the pieces that every version has, in the order of the first."""

    pieces: list[str]
    unstamped: str
    """The first version without its numbers and stamps."""

    @classmethod
    def of(cls, text: str) -> _Head:
        return cls(_pieces(text), _unstamped(text))

    def take(self, text: str) -> bool:
        """Whether a text is a version of this prompt; then the pieces that both have stay."""
        found = Counter(_pieces(text))
        kept = [piece for piece in self.pieces if found[piece]]
        shorter = min(sum(map(len, self.pieces)), len(text))
        is_version = bool(kept) and sum(map(len, kept)) >= _SAME_SHARE * shorter
        if not is_version and _unstamped(text) != self.unstamped:
            return False
        self.pieces = kept
        return True


@dataclass(slots=True)
class _Sent:
    """The messages of a session so far."""

    ranks: dict[JsonValue, int] = field(default_factory=dict)
    """Ids of tool calls, in the order in which their results were first sent."""
    # By their places and names: messages as they were first sent or generated, and what was appended to them.
    first: dict[tuple[int, str], Message] = field(default_factory=dict)
    appended: dict[tuple[int, str], str] = field(default_factory=dict)
    last_volatile: str = ""


@dataclass(slots=True)
class Rewriter:
    """Rewrites sessions; `learn` must see all of them first."""

    num_changed: Counter[str] = field(default_factory=Counter)
    """Rewritten calls by rule."""
    changed: set[int] = field(default_factory=set)
    """Groups that have such calls."""
    left: set[int] = field(default_factory=set)
    """Groups whose calls stay as recorded."""
    _group: int = 0
    _heads: list[_Head] = field(default_factory=list)
    _head_of: dict[bytes, _Head] = field(default_factory=dict)
    # Tools by name, in the order in which they were first sent; objects by their values, as they were first written.
    _ranks: dict[str, int] = field(default_factory=dict)
    _forms: dict[str, JsonValue] = field(default_factory=dict)

    def learn(self, sessions: Iterable[Session]) -> None:
        """Note the system prompts of all calls; memory grows with distinct ones."""
        for session in sessions:
            for call in session.calls():
                if (text := _system_text(call.messages)) is None or _digest(text) in self._head_of:
                    continue
                head = next((head for head in self._heads if head.take(text)), None)
                if head is None:
                    head = _Head.of(text)
                    self._heads.append(head)
                self._head_of[_digest(text)] = head

    def group(self, call: Call) -> int:
        """A number that the calls with versions of one system prompt share; 0 without one."""
        text = _system_text(call.messages)
        head = None if text is None else self._head_of.get(_digest(text))
        return 0 if head is None else 1 + self._heads.index(head)

    def rewrite(self, session: Session) -> Session:
        """The session with its calls rewritten, in their order; answers are as recorded."""
        sent: dict[str | None, _Sent] = {}
        pool: list[Message] = []
        specs: list[CallSpec] = []
        for call, spec in zip(session.calls(), session.specs, strict=True):
            self._group = self.group(call)
            is_left = self._group in self.left
            messages = call.messages if is_left else self._messages(call, sent.setdefault(call.agent, _Sent()))
            start = len(pool)
            pool += messages
            answer = call.completion
            if answer is not None:
                pool.append(answer)
            specs.append(
                msgspec.structs.replace(
                    spec,
                    spans=((start, start + len(messages)),),
                    completion=None if answer is None else len(pool) - 1,
                    tools=call.tools if is_left else self._tools(call),
                    prompt_tokens=None,
                )
            )
        return msgspec.structs.replace(session, pool=pool, specs=specs)

    def _messages(self, call: Call, sent: _Sent) -> list[Message]:
        ordered, volatile = self._without_head(call.messages)
        messages = _with_first_order(ordered, sent.ranks)
        self._count("results", messages != ordered)
        keyed = [(index, _norm(message)) for index, message in enumerate(messages)]
        # After the last answer everything is new.
        answered = max((n for n, one in enumerate(messages) if one.get("role") == "assistant"), default=0)
        as_first = [
            sent.first.get(key, message) if 0 < key[0] <= answered else message
            for key, message in zip(keyed, messages, strict=True)
        ]
        for key, message in zip(keyed, as_first, strict=True):
            sent.first.setdefault(key, message)
        self._count("history", as_first != messages)
        messages = [self._with_first_keys(message) for message in as_first]
        pairs = [
            (one["content"], other["content"]) for one, other in zip(messages, as_first, strict=True) if one != other
        ]
        # Equal values whose dumps differ have their keys in another order; others are escaped or spaced anew.
        num_keys = sum(json.dumps(json.loads(str(one))) != json.dumps(json.loads(str(other))) for one, other in pairs)
        self._count("keys", num_keys > 0)
        self._count("history", num_keys < len(pairs))
        last = max((n for n, one in enumerate(messages) if one.get("role") in ("user", "tool")), default=None)
        is_whole = len(messages) == 1
        if volatile and volatile != sent.last_volatile and last is not None and not is_whole:
            sent.appended[keyed[last]] = sent.last_volatile = volatile
        for index, key in enumerate(keyed):
            if key in sent.appended:
                messages[index] = _appended(messages[index], sent.appended[key])
        if volatile and is_whole:
            messages = [_appended(messages[0], volatile)]
        if call.completion is not None:
            answer = (len(messages), _norm(call.completion))
            sent.first.setdefault(answer, call.completion)
        return messages

    def _without_head(self, messages: list[Message]) -> tuple[list[Message], str]:
        """The messages with the part of the system prompt that all calls have, and the rest of that prompt."""
        text = _system_text(messages)
        head = None if text is None else self._head_of.get(_digest(text))
        if text is None or head is None:
            return list(messages), ""
        stable = "".join(head.pieces)
        if stable.strip() == text.strip() or (len(messages) == 1 and not stable.strip()):
            return list(messages), ""
        left = Counter(head.pieces)
        volatile = []
        for piece in _pieces(text):
            if left[piece]:
                left[piece] -= 1
            else:
                volatile.append(piece)
        self._count("head", True)
        # A prompt of which nothing stays, such as a clock alone, leaves no message behind.
        kept = [{**messages[0], "content": stable}] if stable.strip() else []
        return [*kept, *messages[1:]], "".join(volatile).strip()

    def _tools(self, call: Call) -> list[JsonValue] | None:
        if call.tools is None:
            return None
        for tool in call.tools:
            self._ranks.setdefault(_tool_name(tool), len(self._ranks))
        ordered = sorted(call.tools, key=lambda tool: self._ranks[_tool_name(tool)])
        self._count("tools", ordered != call.tools)
        first = [self._forms.setdefault(json.dumps(_sorted(tool)), tool) for tool in ordered]
        self._count("keys", json.dumps(first) != json.dumps(ordered))
        return first

    def _with_first_keys(self, message: Message) -> Message:
        """A tool's result as it was first written, if it is JSON. Arguments come back as the model wrote them."""
        content = message.get("content")
        if message.get("role") != "tool" or not isinstance(content, str) or (key := _sorted_text(content)) is None:
            return message
        return {**message, "content": self._forms.setdefault(key, content)}

    def _count(self, rule: str, is_changed: bool) -> None:
        if is_changed:
            self.num_changed[rule] += 1
            self.changed.add(self._group)


def request_lines(session: Session) -> Iterator[bytes]:
    """The calls of a session as chat requests, one JSON object a line, as `pic_traces` reads them."""
    for call in session.calls():
        body = {"session_id": call.session_id, "messages": call.messages, "tools": call.tools, **call.options}
        line = {**body, "response": call.completion}
        yield msgspec.json.encode({key: value for key, value in line.items() if value is not None}) + b"\n"


def _pieces(text: str) -> list[str]:
    """The lines of a text with what belongs to them, and the sentences of long lines; joined they are the text.

    An item has its deeper lines and closing brackets, and items of several lines are one list with its heading.
    """
    if _sorted_text(text) is not None:
        return [text]
    items: list[str] = []
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        last = items[-1] if items else ""
        is_deeper = bool(line.strip()) and _indent(line) > _indent(last) and _ITEM.match(last.split("\n")[0])
        is_end = _is_block(last) and _indent(line) == _indent(last) and line.lstrip()[:1] in ("}", "]", ")")
        if last.strip() and (is_deeper or is_end or (_is_block(last) and line.lstrip().startswith("</"))):
            items[-1] += line
        else:
            items.append(line)
    pieces: list[str] = []
    for item in items:
        if pieces and _is_block(item) and (_is_block(pieces[-1]) or pieces[-1].rstrip().endswith(":")):
            pieces[-1] += item
        elif _is_block(item) or len(item) <= _LINE_CHARS or _ITEM.match(item) or '{"' in item:
            pieces.append(item)
        else:
            pieces += _SENTENCE.findall(item)
    return pieces


def _is_block(item: str) -> bool:
    return "\n" in item.rstrip()


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(" \t"))


def _with_first_order(messages: list[Message], ranks: dict[JsonValue, int]) -> list[Message]:
    """The messages with neighboring results of tools in the order in which they were first sent."""
    ordered: list[Message] = []
    for is_result, some in groupby(messages, lambda message: message.get("role") == "tool"):
        group = list(some)
        if is_result and all("tool_call_id" in message for message in group):
            for message in group:
                ranks.setdefault(message["tool_call_id"], len(ranks))
            group.sort(key=lambda message: ranks[message["tool_call_id"]])
        ordered += group
    return ordered


def _unstamped(text: str) -> str:
    return _RESTAMPED.sub("", text)


def _system_text(messages: list[Message]) -> str | None:
    first = messages[0] if messages else {}
    # An agent that keeps no history has all of its prompt in one message.
    if first.get("role") not in ("system", "developer", *(["user"] if len(messages) == 1 else [])):
        return None
    content = first.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        # Blocks are sentences of their own, as every template shows them.
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else None


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _norm(message: Message) -> str:
    """A name that all versions of a message share."""
    content, calls = message.get("content"), message.get("tool_calls")
    text = _unstamped(content if isinstance(content, str) else json.dumps(content or ""))
    made = _unstamped(json.dumps(_sorted(calls))) if calls else ""
    return hashlib.blake2b(f"{text}\0{made}".encode(), digest_size=8).hexdigest()


def _appended(message: Message, text: str) -> Message:
    content = message.get("content")
    if isinstance(content, str) and _sorted_text(content) is not None:
        content = [{"type": "text", "text": content}]
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": f"{content or ''}\n\n{text}"}


def _sorted_text(text: str) -> str | None:
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def _sorted(value: JsonValue) -> JsonValue:
    """A value whose objects have sorted keys, also those that are JSON in a string."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return _sorted_text(value) or value if isinstance(value, str) else value


def _tool_name(tool: JsonValue) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(function.get("name")) if isinstance(function, dict) else ""
