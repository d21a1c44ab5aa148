"""The references: one file per op, same name and signature, plain torch, readable first."""

from __future__ import annotations

from .splice_index import splice_index
from .splice_rows import splice_rows

__all__ = ["splice_index", "splice_rows"]
