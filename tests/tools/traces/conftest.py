"""Anthropic's bodies are compared with what SGLang makes of them."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("sglang") is None:
    collect_ignore = ["test_anthropic_log.py"]
