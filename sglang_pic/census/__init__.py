"""Counts, without a model or a GPU, what a prefix cache serves of recorded calls and what this cache would add."""

from __future__ import annotations

from sglang_pic.census.outcome import EXPECTED_LEN, CallRef, Outcome, RunSpan

__all__ = ["EXPECTED_LEN", "CallRef", "Outcome", "RunSpan"]
