"""Traces of LLM calls: formats, loaders, seeded generators, and (in `replay`) the locust replay.

Knows neither torch nor SGLang. Importing it starts nothing; locust is only imported inside the replay's own process.
"""

from __future__ import annotations

from pic_traces.session import Call, CallSpec, Message, Session
from pic_traces.source import limit, load

__all__ = ["Call", "CallSpec", "Message", "Session", "limit", "load"]
