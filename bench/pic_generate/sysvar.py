"""`gen:sysvar`: a few words that change with every call stand late in a long system prompt.

The system-variable workload of Irminsul (arXiv:2605.05696, evaluation), reconstructed, with defaults that give about
its split: 73.7 % exact prefix and 26.3 % after the variable.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Annotated

from msgspec import Meta
from pic_traces.session import Session

from pic_generate.options import Options
from pic_generate.session_writer import WriterFactory

_MODELS = ("aster-large", "aster-small-2", "birch-70b-instruct", "cedar-mini")
_FIRST_DAY = datetime(2026, 1, 5)


class SysVar(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `gen:sysvar`; lengths in tokens."""

    before: Annotated[int, Meta(ge=0, description="length of the system prompt before the variable")] = 4600
    after: Annotated[int, Meta(ge=0, description="length of the system prompt after it")] = 1200
    turn: Annotated[int, Meta(ge=1, description="length of a user message")] = 16
    answer: Annotated[int, Meta(ge=1, description="length of an answer; the history grows by both")] = 24

    def write(self, writers: WriterFactory) -> Iterator[Session]:
        shared = writers.writer("sysvar prompt")
        before, after = shared.prose(self.before), shared.prose(self.after)
        for draft in writers.drafts():
            history: list[int] = []
            clock = _FIRST_DAY + timedelta(seconds=draft.rng.randrange(300 * 86_400))
            for _ in range(self.calls):
                clock += timedelta(seconds=draft.rng.randint(4, 180))
                parts = [before, self._field(draft.rng, clock, len(history)), after]
                system = draft.add({"role": "system", "content": "\n\n".join(part for part in parts if part)})
                history.append(draft.add(draft.message("user", self.turn)))
                history.append(draft.call([system, *history], draft.message("assistant", self.answer)))
            yield draft.session()

    def _field(self, rng: random.Random, clock: datetime, num_messages: int) -> str:
        num_tokens = num_messages // 2 * (self.turn + self.answer)
        lines = (
            f"Current time: {clock:%Y-%m-%d %H:%M:%S}",
            f"Session so far: {num_messages} messages, {num_tokens} tokens",
            f"Model: {rng.choice(_MODELS)}",
        )
        return "\n".join(lines)
