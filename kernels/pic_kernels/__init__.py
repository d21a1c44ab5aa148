"""Fused gather-rotate-scatter over the KV rows of all layers, each op beside a plain reference.

Raw tensors in and out: knows torch, neither SGLang nor `sglang_pic`. `SGLANG_PIC_KERNELS=reference` runs the
references instead, for debugging.
"""

from __future__ import annotations

from .rope_params import RopeParams
from .splice_mha import splice_mha
from .splice_mla import splice_mla

__all__ = ["RopeParams", "splice_mha", "splice_mla"]
