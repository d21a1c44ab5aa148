"""`gen:subagents`: a main agent hands parts of its context to subagents, and their findings come back.

The shape of role-playing companies of agents and of coding agents that delegate: code and findings stand again in a
fresh prompt, behind another system prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta
from pic_traces.session import Session

from pic_generate.options import Options
from pic_generate.studio import Draft, Studio
from pic_generate.tool_schemas import CODING_TOOLS, START_AGENT


class Subagents(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `gen:subagents`; lengths in tokens."""

    subagents: Annotated[int, Meta(ge=1, description="subagents of a session, one after the other")] = 4
    steps: Annotated[int, Meta(ge=1, description="calls of a subagent, the last of which reports")] = 2
    pasted: Annotated[
        int, Meta(ge=1, description="files a subagent gets passages of, the last ones that the main agent read")
    ] = 3
    code: Annotated[int, Meta(ge=20, description="length of a file that an agent reads")] = 300
    findings: Annotated[int, Meta(ge=1, description="length of a subagent's report, pasted back and to the next")] = 120
    brief: Annotated[int, Meta(ge=1, description="length of a task, the user's or a subagent's own part")] = 60
    thought: Annotated[int, Meta(ge=1, description="length of the text beside a tool call")] = 30
    system: Annotated[int, Meta(ge=1, description="length of the main agent's system prompt")] = 500
    sub_system: Annotated[int, Meta(ge=1, description="length of the subagents' system prompt")] = 300
    calls: Annotated[int, Meta(ge=1, description="LLM calls of the main agent; those of subagents come on top")] = 10

    def __post_init__(self) -> None:
        least = 2 * (self.subagents + 1)
        if self.calls < least:
            raise ValueError(f"calls={self.calls!r}: must be {least} or more with subagents={self.subagents!r}")

    def write(self, studio: Studio) -> Iterator[Session]:
        shared = studio.writer("subagents prompt")
        system_text, sub_system_text = shared.prose(self.system), shared.prose(self.sub_system)
        # Between two starts, and after the last, the main agent makes a call of its own.
        starts = {(number + 1) * self.calls // (self.subagents + 1): number for number in range(self.subagents)}
        for draft in studio.drafts():
            system = draft.add({"role": "system", "content": system_text})
            sub_system = draft.add({"role": "system", "content": sub_system_text})
            prompt = [system, draft.add(draft.message("user", self.brief))]
            files: list[str] = []
            report = ""
            for number in range(self.calls):
                if number in starts:
                    task = self._task(draft, files, report)
                    report = draft.prose(self.findings)
                    arguments = {"title": draft.prose(6), "task": task}
                    call, result = draft.tool_exchange("start_agent", arguments, report, self.thought)
                else:
                    call, result = draft.read_file(self.code, self.thought)
                    files.append(str(result["content"]))
                prompt.append(draft.call(prompt, call, tools=[*CODING_TOOLS, START_AGENT]))
                if number in starts:
                    self._run(draft, sub_system, task, report, f"subagent-{starts[number] + 1}")
                prompt.append(draft.add(result))
            yield draft.session()

    def _task(self, draft: Draft, files: list[str], report: str) -> str:
        """What a subagent is told: words of its own, passages of files, and the report of the one before it."""
        parts = [draft.prose(self.brief), *(_passage(draft, code) for code in files[-self.pasted :]), report]
        return "\n\n".join(part for part in parts if part)

    def _run(self, draft: Draft, system: int, task: str, report: str, agent: str) -> None:
        prompt = [system, draft.add({"role": "user", "content": task})]
        for _ in range(self.steps - 1):
            call, result = draft.read_file(self.code, self.thought)
            prompt.append(draft.call(prompt, call, tools=CODING_TOOLS, agent=agent))
            prompt.append(draft.add(result))
        draft.call(prompt, {"role": "assistant", "content": report}, tools=CODING_TOOLS, agent=agent)


def _passage(draft: Draft, code: str) -> str:
    """Half to all of the lines, from anywhere: what is pasted begins and ends where the sender likes."""
    lines = code.split("\n")
    num_lines = draft.rng.randint((len(lines) + 1) // 2, len(lines))
    first = draft.rng.randint(0, len(lines) - num_lines)
    return "\n".join(lines[first : first + num_lines])
