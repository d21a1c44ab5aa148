"""A small stand-in for encoder and census: words for tokens, and brute force for the cache. It serves tests only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from pic_traces.encode.encoded import EncodedCall, Encoder, Part, Tokens
from pic_traces.session import Call, Message, Session

from sglang_pic.census.outcome import CallRef, ChangedField, Outcome, RunSpan
from sglang_pic.core import Context, Span
from sglang_pic.core.spans import subtract_spans

_PIECE = re.compile(r"<\|\w+\|>| ?[^\W\d_]+| ?\d{1,3}|\n+|\s|[^\s]")
_BLOCK = 8
_WINDOW = 16


@dataclass(frozen=True, slots=True)
class WordCall:
    """One call, each of its tokens a word, a few digits or a sign."""

    path: Tokens
    prompt_len: int
    parts: tuple[Part, ...]
    words: list[str]

    @property
    def tokens(self) -> Tokens:
        """The prompt."""
        return self.path[: self.prompt_len]

    def text(self, start: int, end: int) -> str:
        """The words of a span."""
        return "".join(self.words[token] for token in self.path[start:end])


@dataclass(slots=True)
class WordEncoder:
    """ChatML over words; ids are given in the order in which words are seen."""

    name: str = "words"
    is_exact: bool = False
    words: list[str] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)

    @property
    def delimiters(self) -> frozenset[int]:
        """Where messages begin and end."""
        return frozenset(self._id(mark) for mark in ("<|im_start|>", "<|im_end|>"))

    @property
    def texts(self) -> list[str]:
        """The words so far."""
        return self.words

    def encode(self, call: Call) -> EncodedCall:
        """The ids of one call."""
        ids: list[int] = []
        parts: list[Part] = []
        for message in call.messages:
            start = len(ids)
            ids += self.ids_of(_render(message))
            parts.append(Part(start, len(ids), str(message["role"])))
        start = len(ids)
        ids += self.ids_of("<|im_start|>assistant\n")
        parts.append(Part(start, len(ids), "template"))
        prompt_len = len(ids)
        if call.completion is not None:
            ids += self.ids_of(_render(call.completion))[len(self.ids_of("<|im_start|>assistant\n")) :]
        return WordCall(np.array(ids, np.int32), prompt_len, tuple(parts), self.words)

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """The text of any ids."""
        return "".join(self.words[token] for token in tokens)

    def ids_of(self, text: str) -> list[int]:
        """The ids of a text."""
        return [self._id(piece) for piece in _PIECE.findall(text)]

    def _id(self, piece: str) -> int:
        if piece not in self.ids:
            self.ids[piece] = len(self.words)
            self.words.append(piece)
        return self.ids[piece]


def _render(message: Message) -> str:
    content = message.get("content") or ""
    calls = message.get("tool_calls")
    text = f"{content}{json.dumps(calls) if calls else ''}"
    return f"<|im_start|>{message['role']}\n{text}<|im_end|>\n"


def chat(*contents: str) -> list[Message]:
    """Messages of alternating roles, the first one the system's."""
    roles = ["system", *(["user", "assistant"] * len(contents))]
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def call_of(
    messages: list[Message], answer: str = "ok", *, session: str = "s", index: int = 0, agent: str | None = None
) -> Call:
    """One call with its answer."""
    return Call(
        session_id=session,
        index=index,
        messages=messages,
        completion={"role": "assistant", "content": answer},
        tools=None,
        agent=agent,
        options={},
    )


def calls_of(sessions: Iterable[Session]) -> Iterator[Call]:
    """All calls, in order."""
    for session in sessions:
        yield from session.calls()


def serve(calls: Iterable[Call], encoder: Encoder | None = None, *, min_run: int = 64) -> Iterator[Outcome]:
    """An unlimited cache by brute force: fit for some hundred calls."""
    encoder = encoder or WordEncoder()
    paths: list[Tokens] = []
    refs: list[CallRef] = []
    heads: dict[int, list[int]] = {}
    windows: dict[bytes, tuple[int, int]] = {}
    for number, call in enumerate(calls):
        encoded = encoder.encode(call)
        ref = CallRef(number, "trace.jsonl", call.session_id, call.index)
        prefix_len, neighbor = _longest_prefix(encoded.path, paths, heads)
        prefix_len = min(prefix_len, len(encoded.tokens) - 1)
        runs = tuple(_runs(encoded.tokens, prefix_len, paths, refs, windows, min_run))
        expected = np.empty(0, np.int32) if neighbor is None else paths[neighbor][prefix_len : prefix_len + 4096]
        yield Outcome(
            ref=ref,
            agent=call.agent,
            encoded=encoded,
            prefix_len=prefix_len,
            runs=runs,
            neighbor=None if neighbor is None else refs[neighbor],
            expected=expected,
        )
        refs.append(ref)
        paths.append(encoded.path)
        for key in _block_keys(encoded.path):
            heads.setdefault(key, []).append(number)
        for at in range(prefix_len, len(encoded.path) - _WINDOW):
            if not any(run.start <= at < run.end for run in runs):
                windows.setdefault(encoded.path[at : at + _WINDOW].tobytes(), (number, at))


def _block_keys(path: Tokens) -> list[int]:
    keys, key = [], 0
    for at in range(0, len(path) - _BLOCK + 1, _BLOCK):
        key = hash((key, path[at : at + _BLOCK].tobytes()))
        keys.append(key)
    return keys


def _longest_prefix(path: Tokens, paths: list[Tokens], heads: dict[int, list[int]]) -> tuple[int, int | None]:
    candidates: list[int] = list(range(len(paths)))
    for key in _block_keys(path):
        if key not in heads:
            break
        candidates = heads[key]
    found = max(((common(path, paths[number]), number) for number in candidates), default=(0, 0))
    return found if found[0] else (0, None)


def common(one: Tokens, other: Tokens) -> int:
    """How many leading tokens are equal."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


def _runs(
    tokens: Tokens,
    prefix_len: int,
    paths: list[Tokens],
    refs: list[CallRef],
    windows: dict[bytes, tuple[int, int]],
    min_run: int,
) -> Iterator[RunSpan]:
    at = prefix_len
    end = len(tokens) - 1
    while at + _WINDOW <= end:
        place = windows.get(tokens[at : at + _WINDOW].tobytes())
        if place is None:
            at += 1
            continue
        number, donor_at = place
        size = common(tokens[at:end], paths[number][donor_at:])
        if size > min_run:
            yield RunSpan(at + 1, at + size, at - donor_at, 1, refs[number])
            at += size
        else:
            at += 1


def behind_change(outcome: Outcome, changed: ChangedField, *guarded: Span) -> Outcome:
    """The outcome as if a field had changed: runs behind it are cut where something is guarded."""
    runs: list[RunSpan] = []
    for run in outcome.runs:
        if run.start < changed.end:
            runs.append(run)
            continue
        pieces = subtract_spans([(run.start, run.end)], list(guarded))
        runs += [run._replace(start=start, end=end, context=Context.CHANGED) for start, end in pieces]
    return replace(outcome, runs=tuple(runs), changed_fields=(*outcome.changed_fields, changed), guarded=guarded)
