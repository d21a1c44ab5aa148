"""Moves KV rows: the rotation of the live model, views of its KV pool, the splice.

SGLang's objects are read by class name and attribute; its modules are never imported.
"""

from __future__ import annotations

from sglang_pic.runtime.rope import RopeGeometry, read_geometry
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.views import PoolKind, PoolView, view_pool

__all__ = ["PoolKind", "PoolView", "RopeGeometry", "Splicer", "read_geometry", "view_pool"]
