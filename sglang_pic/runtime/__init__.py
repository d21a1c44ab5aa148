"""Moves KV rows: the rotation of the live model, views of its KV pool, the splice.

SGLang's objects are read by class name and attribute; its modules are never imported.
"""

from __future__ import annotations

from sglang_pic.runtime.live_pools import view_pool
from sglang_pic.runtime.rope import RopeGeometry, read_geometry
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.views import PoolKind, PoolView

__all__ = ["PoolKind", "PoolView", "RopeGeometry", "Splicer", "read_geometry", "view_pool"]
