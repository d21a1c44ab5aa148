"""How far rows of a KV pool are apart: the one measure of every start-up check.

Owns the reading of rows in a dtype wide enough to subtract them, and the relative L2. Must not judge.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["norm_of", "relative_error", "wide_rows"]


def wide_rows(buffer: Tensor, slots: Tensor) -> Tensor:
    """The rows of `slots` in float64."""
    # By bytes, because FP8 has no gather on every device.
    return buffer.view(torch.uint8)[slots].view(buffer.dtype).to(torch.float64)


def relative_error(actual: Tensor, expected: Tensor) -> Tensor:
    """The L2 norm of the difference over that of `expected`; NaN where nothing was written: 0 / 0."""
    return norm_of(actual - expected) / norm_of(expected)


def norm_of(*parts: Tensor) -> Tensor:
    """The L2 norm of everything in `parts`."""
    return torch.linalg.vector_norm(torch.cat([part.flatten() for part in parts]))
