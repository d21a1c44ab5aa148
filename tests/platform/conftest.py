"""The attention backend is SGLang's subclass."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("sglang") is None:
    collect_ignore = ["test_cpu_attention.py"]
