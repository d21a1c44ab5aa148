"""Matrix products in half precision on CPUs without instructions for it, such as those with AVX2 only.

There torch multiplies bfloat16 element by element: a prompt of 64 rows takes 4 times as long as in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Final

import torch
from torch.nn import functional

# With fewer rows, converting the weights costs more than the product; answers are decoded with few.
_FEWEST_ROWS: Final = 32

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def install() -> None:
    """Have `linear` multiply as float32 where this CPU is slow in the dtype; idempotent, for worker processes."""
    probes = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    slow = {dtype for dtype, is_fast in probes.items() if not is_fast()}
    if slow and not hasattr(functional.linear, "__wrapped__"):
        functional.linear = in_float32(functional.linear, slow)  # type: ignore[assignment]


def in_float32(linear: Linear, dtypes: Collection[torch.dtype]) -> Linear:
    """`linear`, which multiplies many rows of these dtypes as float32 and rounds the result once."""

    @wraps(linear)
    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.dtype not in dtypes or x.numel() < _FEWEST_ROWS * x.shape[-1]:
            return linear(x, weight, bias)
        return linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    return multiply
