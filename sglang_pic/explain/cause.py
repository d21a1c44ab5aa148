"""The classes of causes, and what is said about each in plain words.

Must not know how they are told apart.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Cause"]


class Cause(Enum):
    """Why a prompt left the path that the cache had; the value is stable and stands in the page's data."""

    CLOCK = "clock"
    ID = "id"
    COUNT = "count"
    FIELD = "field"
    MOVED = "moved"
    REORDERED = "reordered"
    INSERTED = "inserted"
    REMOVED = "removed"
    REPLACED = "replaced"
    ANSWER = "answer"
    COMPACTION = "compaction"
    AGENT = "agent"
    NEW_TASK = "new-task"
    REWIND = "rewind"

    @property
    def label(self) -> str:
        """In plain words."""
        return _TEXTS[self][0]

    @property
    def advice(self) -> str:
        """What it means and what helps, in a sentence or two."""
        return _TEXTS[self][1]


_TEXTS = {
    Cause.CLOCK: (
        "A clock or a date",
        "The time stands in front of text that stays the same. Moved behind it, or rounded, it would break nothing.",
    ),
    Cause.ID: (
        "An id",
        "An identifier was made anew. Keep the one of the first rendering, or move it behind what stays the same.",
    ),
    Cause.COUNT: (
        "A count or a number",
        "A counter or a statistic changes with every call. Moved towards the end it would break less.",
    ),
    Cause.FIELD: (
        "Another short field",
        "A few words differ (a name, a mode, a path) in front of text that stays the same.",
    ),
    Cause.MOVED: (
        "Text that moves towards the end",
        "A reminder or status note is taken from its old place and put in again further down, call after call.",
    ),
    Cause.REORDERED: (
        "Blocks in another order",
        "Documents, tools or examples stand in another order. A fixed order would keep the prefix.",
    ),
    Cause.INSERTED: (
        "An inserted block",
        "Text was put in front of text that was there before, or a list grows in the middle of the prompt.",
    ),
    Cause.REMOVED: (
        "A removed block",
        "Text was taken out or replaced by a stub: context editing, aged tool results.",
    ),
    Cause.REPLACED: (
        "A block with other text",
        "A longer passage (a task, a document, a tool result, code) differs, in front of text that was there before.",
    ),
    Cause.ANSWER: (
        "An answer that came back changed",
        "The client did not send the model's answer back as it was generated: reformatted, trimmed, or rendered "
        "otherwise by the template.",
    ),
    Cause.COMPACTION: (
        "A compaction",
        "The history was replaced by something much shorter. What survives stands nearer to the front.",
    ),
    Cause.AGENT: (
        "Another agent's prompt that shares text",
        "Another agent or a new kind of call, whose prompt quotes text that was computed before.",
    ),
    Cause.NEW_TASK: (
        "Another conversation",
        "A new task: little of what stands behind this place was there before.",
    ),
    Cause.REWIND: (
        "The prompt ends earlier",
        "A retry, or a step back: the whole prompt was there before. Nothing was lost.",
    ),
}
