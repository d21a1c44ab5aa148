"""The classes of causes, and what the page says of each."""

from __future__ import annotations

import tomllib
from enum import Enum
from importlib.resources import files

TEXTS = tomllib.loads((files("sglang_pic.explain") / "assets" / "texts.toml").read_text(encoding="utf-8"))
"""`causes`: label and advice by the value of a `Cause`; `words`: the page's glossary."""


class Cause(Enum):
    """Why a prompt left the path that the cache had; the value is stable and stands in the page's data."""

    CLOCK = "clock"
    ID = "id"
    COUNT = "count"
    FIELD = "field"
    IMAGE = "image"
    ROLE = "role"
    MOVED = "moved"
    REORDERED = "reordered"
    KEYS = "keys"
    INSERTED = "inserted"
    REMOVED = "removed"
    REPLACED = "replaced"
    WINDOW = "window"
    TASK_FIRST = "task-first"
    THOUGHT = "thought"
    ANSWER = "answer"
    COMPACTION = "compaction"
    AGENT = "agent"
    NEW_TASK = "new-task"
    REWIND = "rewind"

    @property
    def label(self) -> str:
        """The cause in plain words."""
        return str(TEXTS["causes"][self.value]["label"])

    @property
    def advice(self) -> str:
        """What the cause means and what helps, in a sentence or two."""
        return str(TEXTS["causes"][self.value]["advice"])
