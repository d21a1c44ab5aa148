"""The start-up check on rows: a moved row must equal the row that the live model computes at the new position.

RoPE attention depends on relative positions only. So a token sequence without a prefix has the same values at any
position, and keys that differ by one rotation, with any model, attention kernel and pool. The caller runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import torch
from pic_kernels.numerics import relative_l2
from torch import Tensor

from sglang_pic.errors import ContractError, Refused, UnsupportedError
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.views import PoolKind, PoolView

ComputeRows: TypeAlias = Callable[[Tensor, int], None]
"""`compute(slots, position)`: write the rows of one token sequence, its first token at `position`, to `slots`."""


class RowLimits(NamedTuple):
    """Limits of the relative L2 between the moved rows of one layer and those computed there."""

    first: float
    """For the first layer, whose rows depend on their own token only: only rounding may differ."""
    deeper: float
    """Usual in the other layers, whose inputs were computed from queries and keys rounded at other positions."""


# Largest seen over shifts on the CPU platform, 2026-11: keys of the first layer, keys and values of any. A wrong base,
# layout or scaling is of order one at some shift in its own layer's keys and in nothing else; depth, and another choice
# of experts, raise keys and values of all later layers, without a bound for every model.
#               tiny-gqa, 4 layers         tiny-mla, 4 (experts)      SmolLM2, 30
#   float32     4.1e-5  1.4e-4  1.3e-4     4.0e-5  1.3e-4  1.3e-4     2.1e-5  3.5e-5  5.1e-5
#   bfloat16    4.1e-3  1.7e-2  1.6e-2     3.9e-3  2.0e-2  1.9e-2     3.6e-3  1.7e-2  3.4e-2
#   fp8_e4m3    4.5e-2  1.1e-1  1.0e-1
ROW_LIMITS: Final[Mapping[torch.dtype, RowLimits]] = MappingProxyType(
    {
        torch.float32: RowLimits(1e-3, 1e-2),
        torch.float16: RowLimits(5e-3, 1e-1),
        torch.bfloat16: RowLimits(2e-2, 2.5e-1),
        torch.float8_e4m3fn: RowLimits(1e-1, 4e-1),
    }
)
"""Limits that the tested models stay below, by the dtype of their KV rows."""

_UNEXPLAINED: Final = 3.0
"""Keys of a deeper layer are rotated wrongly if their error is this many times that of the rest of the rows: errors of
earlier layers are in both."""

_SHIFTS: Final = (1, 17, 1_000, 8_000)


class RowSlots(NamedTuple):
    """Three disjoint sets of slots, `[n]` int64 each, on the pool's device."""

    here: Tensor
    """Rows computed at position 0."""
    there: Tensor
    """Rows computed at another position."""
    moved: Tensor
    """Rows spliced."""


@dataclass(frozen=True, slots=True)
class RowErrors:
    """The largest relative L2 over shifts, of each kind of row."""

    first_keys: float
    """The keys' rotary part in the first layer."""
    keys: float
    """The keys' rotary part in any layer."""
    rest: float
    """Parts that are not rotated, in any layer: values, latent rows, the rest of the keys."""
    unmoved_keys: float
    """Unrotated keys at the longest shift, the smallest over rotated layers: the error of a missing rotation."""
    index_keys: float = 0.0
    """An indexer's keys in any layer; they may have another dtype than the rows."""
    noisy_layers: tuple[int, ...] = ()
    """Layers after the first whose error is larger than in the tested models, but passes."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers, counted from the pool's first, with a rotary embedding but the same keys at any position; they are not
    rotated."""


def checked_shifts(context_len: int, num_tokens: int) -> tuple[int, ...]:
    """The shifts at which rows are compared, within a context; the last one is the longest one back.

    Raises:
        ValueError: the context is too short for any.
    """
    shifts = [shift for shift in _SHIFTS if shift + num_tokens <= context_len]
    if not shifts:
        raise ValueError(f"context_len={context_len!r}: must be at least {num_tokens + 1} to move a row.")
    return (*shifts, -shifts[-1])


def measure_rows(splicer: Splicer, compute: ComputeRows, slots: RowSlots, shifts: Sequence[int]) -> Tensor:
    """Compute rows, move them, and compare them with rows computed there.

    Writes only the rows of `slots`, which the caller owns. Calls `compute` `len(shifts) + 1` times and waits for the
    device.

    Args:
        splicer: the splicer that will serve requests.
        compute: runs the model.
        slots: the slots to write.
        shifts: from `checked_shifts`; a negative one moves rows from `-shift` to position 0.

    Returns:
        `[len(shifts), num_layers, 4]` float64 on the CPU: relative L2 of keys, of the rest, of unrotated keys, and of
        index keys (0 if a layer has none); infinite if rows are not finite or were not written.
    """
    for written in slots:
        splicer.view.fill(written, 0)
    compute(slots.here, 0)
    errors = []
    for shift in shifts:
        compute(slots.there, abs(shift))
        src, fresh = (slots.here, slots.there) if shift > 0 else (slots.there, slots.here)
        splicer.splice(src, slots.moved, torch.full_like(src, shift))
        errors.append([_compare(splicer, layer, src, slots.moved, fresh) for layer in range(splicer.view.num_layers)])
    return torch.tensor(errors, dtype=torch.float64).nan_to_num(nan=torch.inf, posinf=torch.inf)


def judge_rows(errors: Tensor, view: PoolView, shifts: Sequence[int]) -> RowErrors:
    """Refuse a model whose moved rows differ from computed ones.

    The first layer fails above a limit. A deeper one fails if its keys have a larger error than the rest of its rows:
    errors that it inherits, such as another choice of experts, are only reported. A layer that fails, but would not
    with unrotated keys, does not depend on positions, if other layers do.

    Args:
        errors: from `measure_rows`, the worst of all ranks.
        view: the pool they were measured on.
        shifts: the shifts they were measured at.

    Raises:
        ContractError: keys are rotated otherwise than the geometry says, or rows are not finite.
        UnsupportedError: other parts of rows depend on the position too, so no shift is exact.
    """
    limits = ROW_LIMITS[view.dtype]
    still = _unrotated_layers(errors, limits)
    errors, index = torch.where(still[:, None], errors[..., [2, 1, 2]], errors[..., :3]), errors[..., 3]
    keys, rest, wrong = errors[..., 0], errors[..., 1], _wrong(errors, limits)
    # The first layer that fails is the reason; later ones have its error in their inputs.
    over = wrong.transpose(0, 1).nonzero()
    if over.numel():
        layer, at, kind = (int(index) for index in over[0])
        error, limit = float(errors[at, layer, kind]), limits.deeper if layer else limits.first
        where = f"layer {view.start_layer + layer}"
        measured = f"by a relative L2 of {error:.2g}; allowed is {limit:.2g} for {view.dtype} rows"
        if kind == 0:
            raise ContractError(
                f"{where}: keys moved by {shifts[at]} positions differ from keys computed there {measured}. The rotary "
                "base, layout or scaling is not the one read from the model; start without --radix-cache-backend pic."
            )
        rest_name = "latent rows" if view.kind is PoolKind.MLA else "values"
        reason = f"it depends on absolute positions beside its rotary embedding ({rest_name} of {where}, computed "
        raise UnsupportedError(Refused(f"{reason}{shifts[at]} positions away, differ {measured})").line("this model"))
    _judge_index(index, errors[..., :2].amax(dim=-1), view, shifts)
    farthest = max(range(len(shifts)), key=lambda at: abs(shifts[at]))
    worst = errors[..., :2].amax(dim=(0, 2))
    # Layers whose keys depend on positions.
    turns = errors[farthest, :, 2] > errors[farthest, :, 0]
    return RowErrors(
        first_keys=float(keys[:, 0].max()),
        keys=float(keys.max()),
        rest=float(rest.max()),
        unmoved_keys=float(errors[farthest, turns, 2].min()) if turns.any() else 0.0,
        index_keys=float(index.max()),
        noisy_layers=tuple(view.start_layer + int(layer) for layer in (worst > limits.deeper).nonzero()[:, 0]),
        unrotated_layers=tuple(int(layer) for layer in still.nonzero()[:, 0]),
    )


def _wrong(errors: Tensor, limits: RowLimits) -> Tensor:
    """`[num_shifts, num_layers, 2]`: whether keys, and the rest, fail."""
    keys, rest = errors[..., 0], errors[..., 1]
    wrong = errors[..., :2].isinf()
    wrong[:, 0] |= errors[:, 0, :2] > limits.first
    wrong[..., 0] |= (keys > limits.deeper) & (keys > _UNEXPLAINED * rest)
    return wrong


def _judge_index(errors: Tensor, rows: Tensor, view: PoolView, shifts: Sequence[int]) -> None:
    """Refuse index keys whose `errors` beside those of the layers' other rows break the rules for other keys."""
    if view.index_dtype is None:
        return
    limits = ROW_LIMITS[view.index_dtype]
    wrong = _wrong(torch.stack((errors, rows), dim=-1), limits)[..., 0]
    for layer, at in wrong.T.nonzero().tolist()[:1]:
        error, limit = float(errors[at, layer]), limits.deeper if layer else limits.first
        raise ContractError(
            f"layer {view.start_layer + layer}: index keys moved by {shifts[at]} positions differ from keys computed "
            f"there by a relative L2 of {error:.2g}; allowed is {limit:.2g}. The indexer's rotation, its Hadamard "
            "transform or its places are not those read from the model; start without --radix-cache-backend pic."
        )


def _unrotated_layers(errors: Tensor, limits: RowLimits) -> Tensor:
    """`[num_layers]`: whether keys pass at every shift unrotated, and fail at one rotated."""
    turned, unturned = (_wrong(errors[..., kinds], limits)[..., 0].any(dim=0) for kinds in ([0, 1], [2, 1]))
    still = turned & ~unturned
    # NOTE: if this is true of all layers, the pass ignored its positions.
    return still & bool((~still).any())


def _compare(splicer: Splicer, layer: int, src: Tensor, moved: Tensor, fresh: Tensor) -> tuple[float, ...]:
    """The errors of one layer at one shift."""
    view, turns = splicer.view, splicer.rotary_part(layer)
    (unmoved, *_), (got, *got_values), (want, *want_values) = (view.read(layer, rows) for rows in (src, moved, fresh))
    got_rest, want_rest = (
        torch.cat([part.flatten() for part in (keys[..., : turns.start], keys[..., turns.stop :], *values)])
        for keys, values in ((got, got_values), (want, want_values))
    )
    got_index, want_index = (view.read_index(layer, rows) for rows in (moved, fresh))
    return (
        _error(got[..., turns], want[..., turns]),
        _error(got_rest, want_rest),
        _error(unmoved[..., turns], want[..., turns]),
        0.0 if got_index is None or want_index is None else _error(got_index, want_index),
    )


def _error(actual: Tensor, expected: Tensor) -> float:
    # Zeros are rows that were not written.
    return relative_l2(actual, expected) if expected.any() else torch.inf
