"""The references: one file per op, same name and signature, plain torch, readable first."""

from __future__ import annotations

from .splice_mha import splice_mha
from .splice_mla import splice_mla

__all__ = ["splice_mha", "splice_mla"]
