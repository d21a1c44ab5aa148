"""The causes of a break, and what the page says about each."""

from __future__ import annotations

import tomllib
from enum import Enum
from importlib.resources import files

TEXTS = tomllib.loads((files("sglang_pic.explain") / "assets" / "texts.toml").read_text(encoding="utf-8"))
"""`causes`: label and advice by the value of a `Cause`; `words`: the page's glossary."""


class Cause(Enum):
    """Why a prompt differs from the text that the cache had.

    `bench/results/explain-causes.json` has the share of each on recorded sessions.
    """

    NONCE = "nonce"
    CLOCK = "clock"
    ID = "id"
    FIELD = "field"
    MOVED = "moved"
    REORDERED = "reordered"
    INSERTED = "inserted"
    REMOVED = "removed"
    REPLACED = "replaced"
    THOUGHT = "thought"
    ANSWER = "answer"
    COMPACTION = "compaction"
    AGENT = "agent"
    NEW_TASK = "new-task"

    @property
    def label(self) -> str:
        """The cause in a few words."""
        return str(TEXTS["causes"][self.value]["label"])

    @property
    def advice(self) -> str:
        """What the cause means and what helps, in a sentence or two."""
        return str(TEXTS["causes"][self.value]["advice"])
