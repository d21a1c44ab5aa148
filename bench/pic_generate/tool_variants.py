"""`gen:tool_variants`: a long list of tools that comes in a few slightly different versions.

The tool-variants workload of Irminsul (arXiv:2605.05696, evaluation), reconstructed: nearly all is exact prefix because
the versions differ late and come back. `history` turns it into a session that grows.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Annotated

from msgspec import Meta
from pic_traces.session import JsonValue, Session

from pic_generate.options import Options
from pic_generate.session_writer import Draft, Writer, WriterFactory
from pic_generate.tool_schemas import describe_tool, tool_name


class History(Enum):
    """The text after the tools in a session's later calls."""

    NONE = "none"
    KEPT = "kept"


class ToolVariants(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `gen:tool_variants`; lengths in tokens."""

    tools: Annotated[int, Meta(ge=2, description="tools in the plain list")] = 32
    tool: Annotated[int, Meta(ge=40, description="length of a tool's schema as JSON")] = 160
    variants: Annotated[int, Meta(ge=2, description="versions of the list, the plain one among them")] = 4
    history: Annotated[
        History, Meta(description="`none`: each call is a request of its own; `kept`: a tool-calling session grows")
    ] = History.NONE
    system: Annotated[int, Meta(ge=1, description="length of the system prompt")] = 1000
    turn: Annotated[int, Meta(ge=1, description="length of a user message")] = 12
    answer: Annotated[int, Meta(ge=1, description="length of the text beside an answer's tool call")] = 20
    result: Annotated[int, Meta(ge=1, description="length of a tool's result (`history=kept`)")] = 80

    def __post_init__(self) -> None:
        if self.variants > self.tools + 1:
            raise ValueError(
                f"variants={self.variants!r}: must be {self.tools + 1} or less with tools={self.tools!r}: "
                "each version differs in a tool of its own"
            )

    def write(self, writers: WriterFactory) -> Iterator[Session]:
        shared = writers.writer("tool_variants prompt")
        system_text = shared.prose(self.system)
        versions = self._versions(shared)
        for draft in writers.drafts():
            system = draft.add({"role": "system", "content": system_text})
            prompt = [system]
            version = -1
            for number in range(self.calls):
                version = draft.rng.choice([other for other in range(self.variants) if other != version])
                if number == 0 or self.history is History.NONE:
                    prompt = [system, draft.add(draft.message("user", self.turn))]
                prompt += self._step(draft, prompt, versions[version])
            yield draft.session()

    def _step(self, draft: Draft, prompt: list[int], tools: list[JsonValue]) -> list[int]:
        name = tool_name(draft.rng.choice(tools))
        arguments: dict[str, JsonValue] = {"query": draft.prose(6)}
        call, result = draft.tool_exchange(name, arguments, draft.prose(self.result), self.answer)
        return [draft.call(prompt, call, tools=tools), draft.add(result)]

    def _versions(self, writer: Writer) -> list[list[JsonValue]]:
        """The plain list; the others have, in turn, other words in a tool's description, a tool more, a tool less."""
        plain = [writer.tool(self.tool) for _ in range(self.tools)]
        versions = [plain]
        for number in range(self.variants - 1):
            at = self.tools - self.variants + 1 + number
            changed: list[JsonValue] = []
            if number % 3 == 0:
                changed = [describe_tool(plain[at], writer.rng, self.tool // 3, writer.count_tokens)]
            elif number % 3 == 1:
                changed = [plain[at], writer.tool(self.tool)]
            versions.append([*plain[:at], *changed, *plain[at + 1 :]])
        return versions
