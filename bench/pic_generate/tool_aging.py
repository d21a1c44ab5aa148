"""`gen:tool_aging`: a tool-calling agent whose old tool results are replaced by a short stub.

The shape of context editing: a change in the middle of the prompt, call after call, with everything after it
unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta
from pic_traces.session import Session

from pic_generate.options import Calls, Options
from pic_generate.studio import Studio
from pic_generate.tool_schemas import CODING_TOOLS, tool_result

_STUB = "[Old tool result cleared to save space. Call the tool again if you need it.]"


class ToolAging(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `gen:tool_aging`; lengths in tokens."""

    after: Annotated[int, Meta(ge=1, description="a result is in so many prompts before the stub takes its place")] = 5
    batch: Annotated[
        int, Meta(ge=1, description="so many results are cleared at once, when the last of them is due")
    ] = 1
    result: Annotated[int, Meta(ge=1, description="length of a tool's result")] = 500
    thought: Annotated[int, Meta(ge=1, description="length of the text beside a tool call")] = 40
    task: Annotated[int, Meta(ge=1, description="length of the user's task, the only user message")] = 150
    system: Annotated[int, Meta(ge=1, description="length of the system prompt, the same in all sessions")] = 800
    calls: Calls = 24

    def __post_init__(self) -> None:
        if self.after + self.batch >= self.calls:
            raise ValueError(
                f"after={self.after!r}: after + batch must be less than calls={self.calls!r}, or no result grows old"
            )

    def write(self, studio: Studio) -> Iterator[Session]:
        system_text = studio.writer("tool_aging prompt").prose(self.system)
        for draft in studio.drafts():
            start = [
                draft.add({"role": "system", "content": system_text}),
                draft.add(draft.message("user", self.task)),
            ]
            answers: list[int] = []
            results: list[int] = []
            stubs: list[int] = []
            for number in range(self.calls):
                num_cleared = max(0, number - self.after) // self.batch * self.batch
                shown = [*stubs[:num_cleared], *results[num_cleared:]]
                steps = [index for step in zip(answers, shown, strict=True) for index in step]
                call, result = draft.read_file(self.result, self.thought)
                answers.append(draft.call([*start, *steps], call, tools=CODING_TOOLS))
                results.append(draft.add(result))
                stubs.append(draft.add(tool_result(str(result["tool_call_id"]), _STUB)))
            yield draft.session()
