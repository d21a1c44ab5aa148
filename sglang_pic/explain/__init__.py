"""What broke the prefix of recorded calls, and what position-independent reuse would recover: one HTML page.

Knows neither torch nor SGLang; needs no model and no GPU.
"""

from __future__ import annotations

from sglang_pic.explain.cause import Cause
from sglang_pic.explain.causes import Break, Diagnoser
from sglang_pic.explain.data import Payload, PayloadBuilder
from sglang_pic.explain.page import html_page

__all__ = ["Break", "Cause", "Diagnoser", "Payload", "PayloadBuilder", "html_page"]
