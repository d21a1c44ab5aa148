"""An encoder for tests of the census: a message is its token ids, as decimal numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pic_traces.encode.encoded import Part, Tokens
from pic_traces.session import Call, CallSpec, Message, Session

from sglang_pic.core import CoreConfig

Ids = list[int]

CONFIG = CoreConfig(
    seam_tokens=1, tail_tokens=0, min_run_tokens=16, min_spliced_tokens=16, sink_tokens=4, edit="in_place"
)
"""Finds short runs, for short prompts."""


@dataclass(frozen=True)
class _EncodedIds:
    tokens: Tokens
    path: Tokens
    parts: tuple[Part, ...]

    def text(self, start: int, end: int) -> str:
        return " ".join(map(str, self.path[start:end]))


class IdsEncoder:
    """Implements `Encoder`."""

    name = "ids"
    is_exact = True
    delimiters = frozenset({1})
    notes = ()
    texts = tuple(f" n{number}" for number in range(10_000))

    def encode(self, call: Call) -> _EncodedIds:
        """The numbers that the messages say."""
        ids: Ids = []
        parts = []
        for message in call.messages:
            start = len(ids)
            ids += _ids(message)
            parts.append(Part(start, len(ids), str(message["role"])))
        path = np.array(ids + ([] if call.completion is None else _ids(call.completion)), dtype=np.int32)
        return _EncodedIds(path[: len(ids)], path, tuple(parts))


def session(session_id: str, calls: list[tuple[list[Ids], Ids]], *, role: str = "user") -> Session:
    """A session of calls, each with its messages and its answer."""
    pool: list[Message] = []
    specs = []
    for messages, answer in calls:
        start = len(pool)
        pool += [{"role": role, "content": " ".join(map(str, ids))} for ids in messages]
        specs.append(CallSpec(spans=((start, len(pool)),), completion=len(pool)))
        pool.append({"role": "assistant", "content": " ".join(map(str, answer))})
    return Session(session_id=session_id, source="test", pool=pool, specs=specs)


def _ids(message: Message) -> Ids:
    return [int(word) for word in str(message["content"]).split()]
