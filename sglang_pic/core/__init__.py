"""The pure core: finds text that was computed before and decides what to reuse; neither torch nor SGLang."""

from __future__ import annotations

from sglang_pic.core.chunker import Chunks, Tokens, as_tokens
from sglang_pic.core.config import MOST_REUSE, CoreConfig
from sglang_pic.core.index import ContentIndex, IndexStats
from sglang_pic.core.plan import CostModel, DropReason, Path, Plan, PlanOptions, Reason, Run
from sglang_pic.core.planner import Resolver
from sglang_pic.core.policy import ReusePolicy
from sglang_pic.core.spans import Span, intersect_spans

__all__ = [
    "MOST_REUSE",
    "Chunks",
    "ContentIndex",
    "CoreConfig",
    "CostModel",
    "DropReason",
    "IndexStats",
    "Path",
    "Plan",
    "PlanOptions",
    "Reason",
    "Resolver",
    "ReusePolicy",
    "Run",
    "Span",
    "Tokens",
    "as_tokens",
    "intersect_spans",
]
