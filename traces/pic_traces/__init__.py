"""Traces of LLM calls: formats, loaders, seeded generators, and (in `replay`) the locust replay.

Knows neither torch nor SGLang. Importing it starts nothing; locust is only imported inside the replay's own process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pic_traces.session import Call, CallSpec, Message, Session

if TYPE_CHECKING:
    from pic_traces.source import limit, load

__all__ = ["Call", "CallSpec", "Message", "Session", "limit", "load"]


def __getattr__(name: str) -> object:
    """Import `limit` and `load` late: they bring formats and generators that `pic_traces.machine` does not need."""
    if name not in ("limit", "load"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pic_traces import source

    return getattr(source, name)
