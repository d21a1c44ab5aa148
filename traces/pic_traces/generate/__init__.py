"""Seeded generators of reuse patterns, addressed as `gen:NAME?key=value&...`.

One file a workload, one struct of options a workload, all of them in `WORKLOADS`. Must not know files, servers or
locust.

Where a new workload goes: a file with a subclass of `Options` (its lengths, each with a limit and a meaning) and its
`write`; an entry in `catalogue.py`; its shape proven by a test; the README's tables, which a test compares.
"""

from __future__ import annotations

from pic_traces.generate.agent_meta import AgentMeta
from pic_traces.generate.catalogue import WORKLOADS, Workload, describe_workloads, generate, partition_shift
from pic_traces.generate.compact import Compact
from pic_traces.generate.options import Option, Options, list_options
from pic_traces.generate.random_text import RandomText
from pic_traces.generate.reorder import Reorder
from pic_traces.generate.rerank import Rerank
from pic_traces.generate.skills import Skills
from pic_traces.generate.subagents import Subagents
from pic_traces.generate.sysvar import SysVar
from pic_traces.generate.tool_aging import ToolAging
from pic_traces.generate.tool_variants import ToolVariants

__all__ = [
    "WORKLOADS",
    "AgentMeta",
    "Compact",
    "Option",
    "Options",
    "RandomText",
    "Reorder",
    "Rerank",
    "Skills",
    "Subagents",
    "SysVar",
    "ToolAging",
    "ToolVariants",
    "Workload",
    "describe_workloads",
    "generate",
    "list_options",
    "partition_shift",
]
