"""The rotation that every reference shares: a pair `(a, b)` rotated by an angle, in float32.

a' = a cos - b sin        b' = b cos + a sin
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rope_params import RopeParams


def rotate(rows: Tensor, shifts: Tensor, rope: RopeParams) -> Tensor:
    """`rows` rotated by `shifts` positions; a row whose shift is 0 is returned bit for bit.

    Args:
        rows: `[n, heads, rotary_dim]`, any float dtype.
        shifts: `[n]`, int32 or int64.
        rope: the frequencies and the layout of the pairs.

    Returns:
        A tensor like `rows`, each value rounded once. FP8 saturates at the largest finite value. A per-tensor
        FP8 scale needs no argument: the rotation is linear, so the scale cancels.
    """
    cos, sin = (table.unsqueeze(1) for table in rope.cos_sin(shifts))  # [n, 1, rotary_dim / 2]
    turned = rotate_pairs(rows.to(torch.float32), cos, sin, is_neox=rope.is_neox_style)
    if rows.dtype == torch.float8_e4m3fn:
        limit = torch.finfo(rows.dtype).max
        turned = turned.clamp(-limit, limit)
    still = (shifts == 0).view(-1, 1, 1)
    # NOTE: x * 1 - y * 0 loses the sign of a zero and turns an infinity into NaN, hence the choice by bytes.
    bits = _BITS[rows.element_size()]
    return torch.where(still, rows.view(bits), turned.to(rows.dtype).view(bits)).view(rows.dtype)


def rotate_pairs(rows: Tensor, cos: Tensor, sin: Tensor, *, is_neox: bool) -> Tensor:
    """`rows` `[n, heads, rotary_dim]` float32, rotated; `cos` and `sin` are `[n, 1, rotary_dim / 2]`."""
    if is_neox:
        a, b = rows.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    a, b = rows[..., 0::2], rows[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
