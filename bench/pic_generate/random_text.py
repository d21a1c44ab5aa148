"""`gen:random`: fresh text from the first word on, so that there is nothing to reuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta
from pic_traces.session import Session

from pic_generate.options import Calls, Options, Sessions
from pic_generate.session_writer import WriterFactory


class RandomText(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `gen:random`; lengths in tokens."""

    prompt: Annotated[int, Meta(ge=8, description="length of a call's messages")] = 1000
    answer: Annotated[int, Meta(ge=1, description="length of an answer")] = 16
    calls: Calls = 1
    sessions: Sessions = 50

    def write(self, writers: WriterFactory) -> Iterator[Session]:
        # NOTE: with no system message many chat templates put in one of their own, which would be a prefix hit.
        half = self.prompt // 2
        for draft in writers.drafts():
            for _ in range(self.calls):
                prompt = [
                    draft.add(draft.message("system", half)),
                    draft.add(draft.message("user", self.prompt - half)),
                ]
                draft.call(prompt, draft.message("assistant", self.answer))
            yield draft.session()
