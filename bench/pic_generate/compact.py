"""`gen:compact`: a session that only grows, until a summary takes the place of its older part.

The compaction workload of Irminsul (arXiv:2605.05696, evaluation), reconstructed. The recent messages are kept verbatim
and move forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta
from pic_traces.session import Session

from pic_generate.options import Calls, Options
from pic_generate.session_writer import WriterFactory

_REQUEST = (
    "The conversation is getting long. Summarise it for your own use: the task, what has been decided, what is known "
    "about the files, and what is left to do. Answer with the summary only."
)
_LEAD = "This conversation continues an earlier one. Its summary:"


class Compact(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `gen:compact`; lengths in tokens."""

    every: Annotated[int, Meta(ge=3, description="one call in so many asks for a summary of what was before")] = 15
    keep: Annotated[int, Meta(ge=1, description="last answers kept verbatim, with the user messages between them")] = 4
    summary: Annotated[int, Meta(ge=1, description="length of a summary")] = 250
    system: Annotated[int, Meta(ge=1, description="length of the system prompt, the same in all sessions")] = 1500
    turn: Annotated[int, Meta(ge=1, description="length of a user message")] = 60
    answer: Annotated[int, Meta(ge=1, description="length of an answer; the history grows by both")] = 150
    calls: Calls = 40

    def __post_init__(self) -> None:
        if self.every >= self.calls:
            raise ValueError(f"every={self.every!r}: must be less than calls={self.calls!r}, or nothing is compacted")
        if self.keep > self.every - 2:
            raise ValueError(
                f"keep={self.keep!r}: must be {self.every - 2} or less with every={self.every!r}, "
                "or a compaction replaces nothing"
            )

    def write(self, writers: WriterFactory) -> Iterator[Session]:
        system_text = writers.writer("compact prompt").prose(self.system)
        for draft in writers.drafts():
            system = draft.add({"role": "system", "content": system_text})
            history: list[int] = []
            for number in range(1, self.calls + 1):
                if number % self.every:
                    history.append(draft.add(draft.message("user", self.turn)))
                    history.append(draft.call([system, *history], draft.message("assistant", self.answer)))
                    continue
                request = draft.add({"role": "user", "content": _REQUEST})
                summary = draft.message("assistant", self.summary)
                draft.call([system, *history, request], summary)
                lead = draft.add({"role": "user", "content": f"{_LEAD}\n\n{summary['content']}"})
                # The tail begins with an answer, so that user and assistant go on taking turns.
                history = [lead, *history[1 - 2 * self.keep :]]
            yield draft.session()
