"""The pure core: finds text that was computed before and plans which rows to reuse; neither torch nor SGLang."""

from __future__ import annotations

from sglang_pic.core.chunker import Chunker
from sglang_pic.core.core_config import MOST_REUSE, CoreConfig
from sglang_pic.core.exactness import Exactness
from sglang_pic.core.index import ContentIndex, RowNames
from sglang_pic.core.lexicon import MESSAGE_BREAK, Lexicon
from sglang_pic.core.native import load_loops
from sglang_pic.core.path import Path
from sglang_pic.core.plan import Context, CostModel, DropReason, Plan, PlanOptions, Reason, Run, num_reads
from sglang_pic.core.policy import PRESETS, ReusePolicy, has_bolder_preset, with_preset
from sglang_pic.core.published import rows_from_store, rows_of_request
from sglang_pic.core.row_source import RowSource
from sglang_pic.core.spans import Span, intersect_spans, merge_spans, subtract_spans
from sglang_pic.core.steps import PositionSteps
from sglang_pic.core.tokens import MEDIA_FROM, Tokens, as_tokens, common_len, common_suffix_len

__all__ = [
    "MEDIA_FROM",
    "MESSAGE_BREAK",
    "MOST_REUSE",
    "PRESETS",
    "Chunker",
    "ContentIndex",
    "Context",
    "CoreConfig",
    "CostModel",
    "DropReason",
    "Exactness",
    "Lexicon",
    "Path",
    "Plan",
    "PlanOptions",
    "PositionSteps",
    "Reason",
    "ReusePolicy",
    "RowNames",
    "RowSource",
    "Run",
    "Span",
    "Tokens",
    "as_tokens",
    "common_len",
    "common_suffix_len",
    "has_bolder_preset",
    "intersect_spans",
    "load_loops",
    "merge_spans",
    "num_reads",
    "rows_from_store",
    "rows_of_request",
    "subtract_spans",
    "with_preset",
]
