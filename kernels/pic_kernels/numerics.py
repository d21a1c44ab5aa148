"""How far an op may be from the exact result, by dtype: the tolerances of the tests and of the start-up checks.

Loosening an entry is a change of its own, with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

MAX_TESTED_SHIFT: Final = 131_072
"""The largest shift, in tokens and either direction, at which the tolerances are tested."""

# Relative L2 of rotated K against K computed at the target position from the same float64 values before
# rotation. bf16, fp16 and fp8 are one rounding of the donor's row plus one of the result.
ROTATE_REL_L2: Final[Mapping[torch.dtype, float]] = MappingProxyType(
    {
        torch.float32: 2e-6,
        torch.float16: 5e-4,
        torch.bfloat16: 4e-3,
        # Three mantissa bits: one rounding errs by up to 2^-4, and a row of four dimensions averages little out.
        torch.float8_e4m3fn: 7e-2,
    }
)
"""Relative L2 error allowed to a rotation, by the dtype of the KV rows."""

INDEX_REL_L2: Final = 6e-2
"""Relative L2 error allowed to one moved index key: two roundings to FP8, 3.6e-2 for an ordinary key."""


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """`|actual - expected| / |expected|` in float64; 0 where both are zero, infinite where only `expected` is."""
    want = expected.to(torch.float64)
    error = torch.linalg.vector_norm(actual.to(torch.float64) - want).item()
    norm = torch.linalg.vector_norm(want).item()
    if norm:
        return error / norm
    return math.inf if error else 0.0
