"""The start-up check that a geometry is the one the live model rotates by.

Owns one experiment: random keys are rotated by the model's own module at two positions, and the kernel has to
turn the first into the second. A wrong base, layout or scaling shows as an error of order one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from pic_kernels import RopeParams, splice_mla
from pic_kernels.numerics import relative_l2
from torch import Tensor, nn

from sglang_pic.errors import ContractError
from sglang_pic.runtime.rope import RopeGeometry, attention_ropes, is_rotary_module, read_params

__all__ = ["CHECKED_SHIFTS", "verify_geometry"]

CHECKED_SHIFTS: Final = (1, 17, 1000, -5)
"""Shifts, in tokens, at which a rotary module is compared with the geometry read from it."""

# What remains is the rounding of the module's own table: float32 angles, or entries kept in the model's dtype.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_START: Final = 11
_NUM_KEYS: Final = 4


def verify_geometry(module: nn.Module, geometry: RopeGeometry) -> float:
    """Compare `geometry` with what the live module does to random keys; milliseconds, nothing is changed.

    Args:
        module: the model, or one rotary embedding of it.
        geometry: what `read_geometry` made of the model.

    Returns:
        The largest relative L2 error seen, over modules and shifts.

    Raises:
        ContractError: the module rotates differently, so SGLang is not what this version was built for.
    """
    if is_rotary_module(module):
        pairs = [(module, params) for params, _ in geometry.groups()]
        pairs = [(rotary, params) for rotary, params in pairs if _same(read_params(rotary), params)] or pairs[:1]
    else:
        by_layer = dict(zip(geometry.layer_ids, geometry.params, strict=True))
        pairs = list({id(at.rotary): (at.rotary, by_layer[at.layer_id]) for at in attention_ropes(module)}.values())
    return max(_verify(rotary, params) for rotary, params in pairs)


def _same(left: RopeParams, right: RopeParams) -> bool:
    return left.is_neox_style == right.is_neox_style and torch.equal(left.inv_freq, right.inv_freq)


def _verify(rotary: nn.Module, params: RopeParams) -> float:
    table: Tensor = rotary.cos_sin_cache  # type: ignore[assignment]
    tolerance = _TOLERANCE.get(table.dtype)
    if tolerance is None:
        raise ContractError(
            f"{type(rotary).__name__}.cos_sin_cache.dtype={table.dtype!r}: expected float32, float16 or bfloat16."
        )
    num_positions = table.shape[0] - abs(int(getattr(rotary, "position_start", 0)))
    worst = 0.0
    for shift in CHECKED_SHIFTS:
        if _START + shift >= num_positions:
            continue
        error = _error_at(rotary, params, shift, table.device)
        if not error <= tolerance:
            raise ContractError(
                f"{type(rotary).__name__}: keys turned by {shift} positions differ from the module's own by a relative "
                f"L2 of {error:.2g}; allowed is {tolerance:.2g} for a {table.dtype} table. This SGLang rotates keys "
                "in a way this version does not know; serve without --radix-cache-backend pic."
            )
        worst = max(worst, error)
    return worst


def _error_at(rotary: nn.Module, params: RopeParams, shift: int, device: torch.device) -> float:
    """Relative L2 of keys moved by `shift` against keys the module rotates at the shifted position."""
    keys = torch.randn((_NUM_KEYS, 2, int(rotary.head_size)), generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    here, there = (_rotated(rotary, keys.to(device), _START + delta) for delta in (0, shift))
    rows = torch.cat((here, torch.full_like(here, torch.nan)))
    slots = torch.arange(2 * _NUM_KEYS, device=device)
    shifts = torch.full((_NUM_KEYS,), shift, device=device)
    splice_mla([rows], slots[:_NUM_KEYS], slots[_NUM_KEYS:], shifts, params.to(device), rope_offset=0)
    return relative_l2(rows[_NUM_KEYS:], there)


def _rotated(rotary: nn.Module, keys: Tensor, position: int) -> Tensor:
    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rotary.forward_native  # type: ignore[assignment]
    positions = torch.full((keys.shape[0],), position, dtype=torch.int64, device=keys.device)
    with torch.no_grad():
        _, rotated = forward(positions, keys.clone(), keys.clone())
    return rotated.reshape(keys.shape).contiguous()
