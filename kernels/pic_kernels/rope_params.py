"""A rotation by a shift: its frequencies, the layout of its pairs, and the cosines and sines of a shift.

Any scaling is folded into `inv_freq` already, and a magnitude factor (YaRN's `mscale`) left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RopeParams:
    """The rotation of one attention layer's keys.

    Attributes:
        inv_freq: `[rotary_dim / 2]`, radians per position after all scaling; float32 as models compute it, or
            float64 where a scaling is only exact there.
        rotary_dim: number of leading dimensions of the rotary part that are rotated; even.
        is_neox_style: True pairs dimension `i` with `i + rotary_dim / 2`; False pairs `2 i` with `2 i + 1`.
        turns: `[rotary_dim / 2]` int64, derived: turns per position, modulo one, in units of 2^-64. A shift times
            this, in integers that wrap, is the angle modulo one turn, as exact as the float64 frequency is.
    """

    inv_freq: Tensor
    rotary_dim: int
    is_neox_style: bool
    turns: Tensor = field(init=False)

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim={self.rotary_dim!r}: must be even and at least 2.")
        if self.inv_freq.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"inv_freq.dtype={self.inv_freq.dtype!r}: must be torch.float32 or torch.float64.")
        if tuple(self.inv_freq.shape) != (self.rotary_dim // 2,):
            raise ValueError(
                f"inv_freq.shape={tuple(self.inv_freq.shape)!r}: must be ({self.rotary_dim // 2},) "
                f"for rotary_dim={self.rotary_dim!r}."
            )
        object.__setattr__(self, "turns", _turns(self.inv_freq))

    def to(self, device: torch.device | str) -> RopeParams:
        """The same parameters on `device`; itself if they are there already."""
        if self.inv_freq.device == torch.device(device):
            return self
        return RopeParams(self.inv_freq.to(device), self.rotary_dim, self.is_neox_style)

    def cos_sin(self, shifts: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `shifts` positions, free of magnitude.

        Angles are formed in float64: a float32 product loses 4e-3 rad at 131,072 positions.

        Args:
            shifts: `[n]`, any integer dtype, on the device of `inv_freq`; negative shifts rotate back.

        Returns:
            Two float32 tensors `[n, rotary_dim / 2]`.
        """
        angles = shifts.to(torch.float64).unsqueeze(1) * self.inv_freq.to(torch.float64)
        return angles.cos().to(torch.float32), angles.sin().to(torch.float32)


def _turns(inv_freq: Tensor) -> Tensor:
    per_position = inv_freq.to(torch.float64) / math.tau
    # In [-0.5, 0.5), where 2^64 times it is an int64; the product with a power of two is exact.
    fraction = per_position - torch.floor(per_position + 0.5)
    return (fraction * 2.0**64).round().to(torch.int64)
