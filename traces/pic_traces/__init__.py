"""Traces of LLM calls: formats and their loaders, and encoders of calls into tokens.

Knows neither torch nor SGLang.
"""

from __future__ import annotations

from pic_traces.session import Call, CallSpec, Message, Session
from pic_traces.source import limit, load

__all__ = ["Call", "CallSpec", "Message", "Session", "limit", "load"]
