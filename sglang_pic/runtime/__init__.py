"""Moving KV rows: RoPE geometry of the live model, views of its KV pool, the splice executor.

Tensors in, tensors out; SGLang's objects are read by name and attribute, its modules never imported.
"""

from __future__ import annotations

from sglang_pic.runtime.rope import RopeGeometry, read_geometry
from sglang_pic.runtime.rope_check import verify_geometry
from sglang_pic.runtime.splice import SpliceCounts, Splicer
from sglang_pic.runtime.views import PoolKind, PoolView, view_pool

__all__ = [
    "PoolKind",
    "PoolView",
    "RopeGeometry",
    "SpliceCounts",
    "Splicer",
    "read_geometry",
    "verify_geometry",
    "view_pool",
]
