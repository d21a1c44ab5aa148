"""What a prefix cache gets from recorded calls, what this cache would recover, and what is new: no model, no GPU.

Knows neither torch nor SGLang. Importing it starts nothing.
"""

from __future__ import annotations

from sglang_pic.census.outcome import EXPECTED_LEN, CallRef, Outcome, RunSpan

__all__ = ["EXPECTED_LEN", "CallRef", "Outcome", "RunSpan"]
