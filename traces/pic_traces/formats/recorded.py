"""The project's trace format: one recorded session a line, append-only (`turns`) or with explicit `prompts`.

traces/pic_traces/README.md lists the keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pic_traces.formats.bodies import prompt_tokens_of
from pic_traces.formats.reader import Reader
from pic_traces.lines import Line
from pic_traces.session import CallSpec, JsonValue, Message, Session


# NOTE: unknown keys are let through here, unlike in the structs we write: others write these files and may add notes.
class _Record(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str
    messages: list[Message]
    turns: list[int]
    source: str = ""
    license: str | None = None
    prompts: list[list[int | tuple[int, int]]] | None = None
    tools: list[JsonValue] | None = None
    agents: list[str | None] | None = None
    usage: list[JsonValue] | None = None


class Recorded(Reader):
    """Implements `Reader`. A session says which of its messages its calls produced."""

    name = "recorded sessions (`messages` and `turns`)"

    @staticmethod
    def recognizes(line: Line) -> bool:
        return "turns" in line.value

    def take(self, line: Line) -> Iterator[Session]:
        yield parse_recorded(line)


def parse_recorded(line: Line) -> Session:
    """Turn one line into a session.

    Raises:
        TraceError: a key is missing or of the wrong type, a role is missing, or an index is out of range.
    """
    record = line.convert(_Record, "recorded session")
    for index, message in enumerate(record.messages):
        if not isinstance(message.get("role"), str):
            raise line.error(f"messages[{index}] has role {message.get('role')!r}; every message needs a role (string)")
    for name, values in (("prompts", record.prompts), ("agents", record.agents)):
        if values is not None and len(values) != len(record.turns):
            raise line.error(
                f"{name} has {len(values)} entries but turns has {len(record.turns)}; one a call is needed"
            )
    return Session(
        session_id=record.session_id,
        source=record.source,
        license=record.license,
        pool=record.messages,
        specs=[_parse_call(line, record, index) for index in range(len(record.turns))],
    )


def _parse_call(line: Line, record: _Record, index: int) -> CallSpec:
    num_messages = len(record.messages)
    turn = record.turns[index]
    if not 0 <= turn < num_messages:
        raise line.error(
            f"turns[{index}] is {turn}; messages has {num_messages} entries, so 0 to {num_messages - 1} is allowed"
        )
    if record.prompts is None:
        spans: tuple[tuple[int, int], ...] = ((0, turn),)
    else:
        entries = record.prompts[index]
        spans = tuple((entry, entry + 1) if isinstance(entry, int) else entry for entry in entries)
        for entry, (start, end) in zip(entries, spans, strict=True):
            if not 0 <= start <= end <= num_messages:
                raise line.error(
                    f"prompts[{index}] has {entry!r}; "
                    f"indices and half-open ranges within [0, {num_messages}) are allowed"
                )
    if not any(end > start for start, end in spans):
        raise line.error(f"call {index} was sent no messages: turns[{index}] is {turn}")
    return CallSpec(
        spans=spans,
        completion=turn,
        tools=record.tools,
        agent=None if record.agents is None else record.agents[index],
        prompt_tokens=prompt_tokens_of(record.usage[index]) if record.usage and index < len(record.usage) else None,
    )
