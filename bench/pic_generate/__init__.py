"""Seeded generators of reuse patterns, addressed as `gen:NAME?key=value&...`.

Where a new workload goes: a file with a subclass of `Options` (its lengths, each with a limit and a meaning) and its
`write`; an entry in `catalogue.py`; its shape proven by a test; the README's tables, which a test compares.
"""

from __future__ import annotations

from pic_generate.catalogue import WORKLOADS, generate
from pic_generate.options import Option, Options, list_options

__all__ = ["WORKLOADS", "Option", "Options", "generate", "list_options"]
