"""`gen:rerank`: the same retrieved documents in every call, a few of which change places, and a question at the end.

The re-ranking workload of Irminsul (arXiv:2605.05696, evaluation), reconstructed: nearly all is exact prefix because
what moves stands last.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Annotated

from msgspec import Meta
from pic_traces.session import Session

from pic_generate.options import Options
from pic_generate.orders import Place, draw_orders
from pic_generate.studio import Studio


class Rerank(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `gen:rerank`; lengths in tokens."""

    documents: Annotated[int, Meta(ge=2, description="documents in a prompt")] = 20
    document: Annotated[int, Meta(ge=8, description="length of a document")] = 300
    permuted: Annotated[int, Meta(ge=2, description="how many neighbouring documents change places")] = 2
    place: Annotated[Place, Meta(description="where these stand: `start`, `middle` or `end`")] = Place.END
    system: Annotated[int, Meta(ge=1, description="length of the instruction before the documents")] = 600
    query: Annotated[int, Meta(ge=1, description="length of the question after them, one a session")] = 16
    answer: Annotated[int, Meta(ge=1, description="length of an answer")] = 40

    def __post_init__(self) -> None:
        if self.permuted > self.documents:
            raise ValueError(f"permuted={self.permuted!r}: must be documents={self.documents!r} or less")

    def write(self, studio: Studio) -> Iterator[Session]:
        shared = studio.writer("rerank prompt")
        system_text = shared.prose(self.system)
        documents = [shared.document(self.document) for _ in range(self.documents)]
        first = self.place.first(self.documents, self.permuted)
        for draft in studio.drafts():
            system = draft.add({"role": "system", "content": system_text})
            query = draft.prose(self.query)
            orders = draw_orders(draft.rng, self.permuted)
            for order in islice(orders, self.calls):
                moved = [documents[first + place] for place in order]
                parts = [*documents[:first], *moved, *documents[first + self.permuted :], query]
                user = draft.add({"role": "user", "content": "\n\n".join(parts)})
                draft.call([system, user], draft.message("assistant", self.answer))
            yield draft.session()
