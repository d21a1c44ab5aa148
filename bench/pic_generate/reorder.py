"""`gen:reorder`: the same long documents in another order in every call, as in a retrieval chat."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from math import factorial
from typing import Annotated

from msgspec import Meta
from pic_traces.session import Session

from pic_generate.options import Calls, Options, Sessions
from pic_generate.session_writer import WriterFactory


class Reorder(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `gen:reorder`; lengths in tokens."""

    count: Annotated[int, Meta(ge=2, description="how many there are; each session has its own")] = 4
    length: Annotated[int, Meta(ge=40, description="length of one")] = 1500
    system: Annotated[int, Meta(ge=1, description="length of the system prompt")] = 200
    query: Annotated[int, Meta(ge=1, description="length of the question at the end, one a session")] = 40
    answer: Annotated[int, Meta(ge=1, description="length of an answer")] = 60
    calls: Calls = 4
    sessions: Sessions = 24

    def write(self, writers: WriterFactory) -> Iterator[Session]:
        system_text = writers.writer("reorder prompt").prose(self.system)
        for draft in writers.drafts():
            system = draft.add({"role": "system", "content": system_text})
            query = draft.prose(self.query)
            documents = [draft.document(self.length) for _ in range(self.count)]
            for order in islice(draw_orders(draft.rng, self.count), self.calls):
                user = draft.add({"role": "user", "content": "\n\n".join([*(documents[i] for i in order), query])})
                draft.call([system, user], draft.message("assistant", self.answer))
            yield draft.session()


def draw_orders(rng: random.Random, count: int) -> Iterator[tuple[int, ...]]:
    """Yield shuffled orders of `count` places (2 or more), without end.

    None comes again before all have come, and none twice in a row.
    """
    last: tuple[int, ...] = ()
    while True:
        used: set[tuple[int, ...]] = set()
        while len(used) < factorial(count):
            order = tuple(rng.sample(range(count), count))
            if order != last and order not in used:
                used.add(order)
                last = order
                yield order
