"""Log formats, one reader each, and the order in which a line is offered to them."""

from __future__ import annotations

from pic_traces.formats.chat import Chat
from pic_traces.formats.claude_code import ClaudeCode
from pic_traces.formats.codex import Codex
from pic_traces.formats.envelopes import Envelopes
from pic_traces.formats.exchanges import Har, Vcr
from pic_traces.formats.litellm import LiteLLM
from pic_traces.formats.openhands import OpenHands
from pic_traces.formats.otel import OTel
from pic_traces.formats.reader import Grouping, Reader, Request
from pic_traces.formats.recorded import Recorded
from pic_traces.formats.refused import NO_JSON, NO_MODEL, refusal
from pic_traces.formats.responses import Responses
from pic_traces.formats.sglang_log import SGLangLog
from pic_traces.formats.trajectory import Trajectory
from pic_traces.formats.unread import Unread

READERS: tuple[type[Reader], ...] = (
    SGLangLog, Recorded, LiteLLM, ClaudeCode, OpenHands, Codex, OTel, Har, Vcr, Trajectory, Chat,
    Responses,
)  # fmt: skip
"""A format that could be taken for another stands before it."""

__all__ = [
    "NO_JSON",
    "NO_MODEL",
    "READERS",
    "Envelopes",
    "Grouping",
    "Reader",
    "Request",
    "SGLangLog",
    "Unread",
    "refusal",
]
