"""`gen:skills`: a library of instructions, some of which are pasted into each conversation wherever they are needed.

The same skill stands after another history every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Annotated

from msgspec import Meta
from pic_traces.session import Session

from pic_generate.options import Calls, Options, Sessions
from pic_generate.studio import Draft, Studio
from pic_generate.tool_schemas import LOAD_SKILL


class Via(Enum):
    """How a skill comes into the conversation."""

    USER = "user"
    TOOL = "tool"


class Skills(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `gen:skills`; lengths in tokens."""

    library: Annotated[int, Meta(ge=1, description="skills there are, the same for all sessions")] = 12
    skill: Annotated[int, Meta(ge=8, description="length of a skill")] = 700
    pasted: Annotated[int, Meta(ge=1, description="different skills in a session, each before a random call")] = 3
    via: Annotated[Via, Meta(description="`user`: inside a user message; `tool`: as the result of a tool call")] = (
        Via.USER
    )
    system: Annotated[int, Meta(ge=1, description="length of the system prompt, the same in all sessions")] = 600
    turn: Annotated[int, Meta(ge=1, description="length of a user message with no skill in it")] = 60
    answer: Annotated[int, Meta(ge=1, description="length of an answer")] = 80
    calls: Calls = 8
    sessions: Sessions = 12

    def __post_init__(self) -> None:
        if self.pasted > min(self.library, self.calls):
            raise ValueError(
                f"pasted={self.pasted!r}: must be library={self.library!r} and calls={self.calls!r} or less: "
                "a session pastes a skill once, and one a call"
            )
        if self.via is Via.TOOL and self.pasted >= self.calls:
            raise ValueError(f"pasted={self.pasted!r}: must be less than calls={self.calls!r} with via=tool")

    def write(self, studio: Studio) -> Iterator[Session]:
        shared = studio.writer("skills library")
        system_text = shared.prose(self.system)
        library = [shared.document(self.skill) for _ in range(self.library)]
        for draft in studio.drafts():
            chosen = draft.rng.sample(library, self.pasted)
            prompt = [draft.add({"role": "system", "content": system_text})]
            if self.via is Via.USER:
                self._paste(draft, prompt, chosen)
            else:
                self._load(draft, prompt, chosen)
            yield draft.session()

    def _paste(self, draft: Draft, prompt: list[int], chosen: list[str]) -> None:
        """Every call follows a user message; some of these have a skill between their own words."""
        pasted = dict(zip(draft.rng.sample(range(self.calls), self.pasted), chosen, strict=True))
        for number in range(self.calls):
            text = draft.prose(self.turn)
            if number in pasted:
                words = text.split(" ")
                cut = draft.rng.randint(0, len(words))
                around = [" ".join(words[:cut]), pasted[number], " ".join(words[cut:])]
                text = "\n\n".join(part for part in around if part)
            prompt.append(draft.add({"role": "user", "content": text}))
            prompt.append(draft.call(prompt, draft.message("assistant", self.answer)))

    def _load(self, draft: Draft, prompt: list[int], chosen: list[str]) -> None:
        """Some calls answer with a tool call that loads a skill; the call after it goes on from there."""
        pasted = dict(zip(draft.rng.sample(range(self.calls - 1), self.pasted), chosen, strict=True))
        asked = False
        for number in range(self.calls):
            if not asked:
                prompt.append(draft.add(draft.message("user", self.turn)))
            asked = number in pasted
            if asked:
                skill = pasted[number]
                call, result = draft.tool_exchange("load_skill", {"name": skill.splitlines()[0]}, skill, self.answer)
                prompt.append(draft.call(prompt, call, tools=[LOAD_SKILL]))
                prompt.append(draft.add(result))
            else:
                prompt.append(draft.call(prompt, draft.message("assistant", self.answer), tools=[LOAD_SKILL]))
