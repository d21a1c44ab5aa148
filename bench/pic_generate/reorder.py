"""`gen:reorder`: the same long documents, or the same tools, in another order in every call, and nothing else changes.

The shape of a retrieval chat whose documents stand at rotated offsets, and of a client that lists its tools in no fixed
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import count, islice
from typing import Annotated

from msgspec import Meta
from pic_traces.session import JsonValue, Session

from pic_generate.options import Calls, Options, Sessions
from pic_generate.orders import draw_orders
from pic_generate.session_writer import WriterFactory


class Items(Enum):
    """The parts that change their order."""

    DOCUMENTS = "documents"
    TOOLS = "tools"


class Order(Enum):
    """How the next order comes from the last."""

    SHUFFLED = "shuffled"
    ROTATED = "rotated"


class Reorder(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `gen:reorder`; lengths in tokens."""

    items: Annotated[Items, Meta(description="what changes places: `documents` or `tools`")] = Items.DOCUMENTS
    count: Annotated[int, Meta(ge=2, description="how many there are; each session has its own")] = 4
    length: Annotated[int, Meta(ge=40, description="length of one")] = 1500
    order: Annotated[
        Order, Meta(description="`shuffled`: none again before all were used; `rotated`: the first becomes the last")
    ] = Order.SHUFFLED
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
            documents: list[str] = []
            tools: list[JsonValue] = []
            for _ in range(self.count):
                if self.items is Items.DOCUMENTS:
                    documents.append(draft.document(self.length))
                else:
                    tools.append(draft.tool(self.length))
            orders = draw_orders(draft.rng, self.count) if self.order is Order.SHUFFLED else _rotations(self.count)
            for order in islice(orders, self.calls):
                listed = [documents[place] for place in order] if documents else []
                user = draft.add({"role": "user", "content": "\n\n".join([*listed, query])})
                answer = draft.message("assistant", self.answer)
                draft.call([system, user], answer, tools=[tools[place] for place in order] if tools else None)
            yield draft.session()


def _rotations(num_places: int) -> Iterator[tuple[int, ...]]:
    for shift in count():
        yield tuple((shift + place) % num_places for place in range(num_places))
