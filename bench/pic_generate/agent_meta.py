"""`gen:agent_meta`: a header that changes with every call stands before a body that never does.

The early-divergence workload of Irminsul (arXiv:2605.05696, evaluation), whose headers have 50, 250, 1000 and 2000
tokens. A reconstruction: the paper's prompts are not published.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta
from pic_traces.session import Session

from pic_generate.options import Options
from pic_generate.session_writer import WriterFactory


class AgentMeta(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `gen:agent_meta`; lengths in tokens."""

    header: Annotated[int, Meta(ge=0, description="length of the changing header at the start of the prompt")] = 250
    jitter: Annotated[
        float, Meta(ge=0, le=1, description="each header has `header * [1 - jitter, 1 + jitter]`, so the rest moves")
    ] = 0.1
    body: Annotated[int, Meta(ge=0, description="length of the body, the same in all calls of all sessions")] = 1500
    turn: Annotated[int, Meta(ge=1, description="length of a user message")] = 40
    answer: Annotated[int, Meta(ge=1, description="length of an answer; the history grows by both")] = 40

    def write(self, writers: WriterFactory) -> Iterator[Session]:
        body = writers.writer("body").prose(self.body)
        spread = round(self.header * self.jitter)
        for draft in writers.drafts():
            history: list[int] = []
            for _ in range(self.calls):
                header = draft.prose(self.header + draft.rng.randint(-spread, spread))
                system = draft.add({"role": "system", "content": f"{header}\n\n{body}" if header else body})
                history.append(draft.add(draft.message("user", self.turn)))
                history.append(draft.call([system, *history], draft.message("assistant", self.answer)))
            yield draft.session()
