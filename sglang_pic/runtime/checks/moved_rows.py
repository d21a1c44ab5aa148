"""The start-up check on rows: a moved row must equal the row that the live model computes at the new position.

RoPE attention sees relative positions only. So a token sequence that is its own whole context has the same values at
any position, and keys that differ by one rotation, whatever the model, its attention kernel and its pool do. The caller
says how rows are computed.
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
    """Relative L2 between the moved rows of one layer and those computed there."""

    first: float
    """Allowed in the first layer. Its rows depend on their own token only, so only rounding may differ."""
    deeper: float
    """Ordinary in the other layers, whose inputs were computed from queries and keys rounded at other positions."""


# Largest seen over shifts on the CPU platform, 2026-11: keys of the first layer, keys and values of any. A wrong base,
# layout or scaling is of order one at some shift in its own layer's keys and in nothing else; depth, and experts chosen
# otherwise, raise keys and values of all layers behind, without a bound that would hold for every model.
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
"""What the tested models stay below, by the dtype of their KV rows."""

_UNEXPLAINED: Final = 3.0
"""Keys of a deeper layer whose error is this many times that of the rest of the rows were turned wrongly: errors of
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
    """Of the keys' rotary part in the first layer."""
    keys: float
    """Of the keys' rotary part in any layer."""
    rest: float
    """Of what does not turn, in any layer: values, latent rows, the rest of the keys."""
    unmoved_keys: float
    """Of keys that were not rotated, at the longest shift, the smallest over layers that turn: how a fault looks."""
    index_keys: float = 0.0
    """Of an indexer's keys in any layer; they may have another dtype than the rows."""
    noisy_layers: tuple[int, ...] = ()
    """Layers behind the first whose error is larger than in the tested models, though nothing in them is wrong."""
    still_layers: tuple[int, ...] = ()
    """Layers, counted from the pool's first, that hold a rotary embedding and whose keys are the same at any position.
    The errors are those of keys that were not rotated there."""


def checked_shifts(context_len: int, num_tokens: int) -> tuple[int, ...]:
    """The shifts at which rows are compared, within a context; the last is there and back.

    Raises:
        ValueError: the context is too short for any.
    """
    shifts = [shift for shift in _SHIFTS if shift + num_tokens <= context_len]
    if not shifts:
        raise ValueError(f"context_len={context_len!r}: must be at least {num_tokens + 1} to move a row.")
    return (*shifts, -shifts[-1])


def measure_rows(splicer: Splicer, compute: ComputeRows, slots: RowSlots, shifts: Sequence[int]) -> Tensor:
    """Compute rows, move them, and compare them with rows computed there.

    Writes the rows of `slots` and nothing else; the caller owns them and puts them back. Makes `len(shifts) + 1` calls
    of `compute` and waits for the device.

    Args:
        splicer: the one that is to serve requests.
        compute: runs the model.
        slots: where.
        shifts: what `checked_shifts` returned; a negative one moves rows from `-shift` to position 0.

    Returns:
        `[len(shifts), num_layers, 4]` float64 on the CPU: relative L2 of keys, of the rest, of keys left unmoved, and
        of index keys (0 where a layer has none); infinite where rows are not finite or were never written.
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
    """Refuse a model whose moved rows are not the rows it computes.

    The first layer is judged by a limit. A deeper one is judged by whether its keys are further off than the rest of
    its rows: what it got from the layers before, such as other experts for some tokens, is reported and not judged.
    A layer that fails, and would not if its keys had been left alone, uses no positions, as long as others do.

    Args:
        errors: what `measure_rows` returned, the worst of all ranks.
        view: the pool they were measured on.
        shifts: the shifts they were measured at.

    Raises:
        ContractError: keys are turned by something else than the geometry says, or rows are not numbers.
        UnsupportedError: what does not turn depends on the position too, so that no shift is exact.
    """
    limits = ROW_LIMITS[view.dtype]
    still = _still_layers(errors, limits)
    errors, index = torch.where(still[:, None], errors[..., [2, 1, 2]], errors[..., :3]), errors[..., 3]
    keys, rest, wrong = errors[..., 0], errors[..., 1], _wrong(errors, limits)
    # The first layer that fails gives the reason; the layers behind it have its error in their inputs.
    over = wrong.transpose(0, 1).nonzero()
    if over.numel():
        layer, at, kind = (int(index) for index in over[0])
        error, limit = float(errors[at, layer, kind]), limits.deeper if layer else limits.first
        where = f"layer {view.start_layer + layer}"
        measured = f"by a relative L2 of {error:.2g}; allowed is {limit:.2g} for {view.dtype} rows"
        if kind == 0:
            raise ContractError(
                f"{where}: keys moved by {shifts[at]} positions differ from keys computed there {measured}. The rotary "
                "base, layout or scaling is not what was read from the model; serve without --radix-cache-backend pic."
            )
        rest_name = "latent rows" if view.kind is PoolKind.MLA else "values"
        reason = f"it depends on absolute positions beside its rotary embedding ({rest_name} of {where}, computed "
        raise UnsupportedError(Refused(f"{reason}{shifts[at]} positions away, differ {measured})").line("this model"))
    _judge_index(index, errors[..., :2].amax(dim=-1), view, shifts)
    farthest = max(range(len(shifts)), key=lambda at: abs(shifts[at]))
    worst = errors[..., :2].amax(dim=(0, 2))
    # Keys of other layers are the same whether they are moved or not.
    turns = errors[farthest, :, 2] > errors[farthest, :, 0]
    return RowErrors(
        first_keys=float(keys[:, 0].max()),
        keys=float(keys.max()),
        rest=float(rest.max()),
        unmoved_keys=float(errors[farthest, turns, 2].min()) if turns.any() else 0.0,
        index_keys=float(index.max()),
        noisy_layers=tuple(view.start_layer + int(layer) for layer in (worst > limits.deeper).nonzero()[:, 0]),
        still_layers=tuple(int(layer) for layer in still.nonzero()[:, 0]),
    )


def _wrong(errors: Tensor, limits: RowLimits) -> Tensor:
    """`[num_shifts, num_layers, 2]`: whether keys, and the rest, are too far off."""
    keys, rest = errors[..., 0], errors[..., 1]
    wrong = errors[..., :2].isinf()
    wrong[:, 0] |= errors[:, 0, :2] > limits.first
    wrong[..., 0] |= (keys > limits.deeper) & (keys > _UNEXPLAINED * rest)
    return wrong


def _judge_index(errors: Tensor, rows: Tensor, view: PoolView, shifts: Sequence[int]) -> None:
    """Refuse index keys that are not the computed ones, as other keys are judged: by a limit, then beside the rows.

    Args:
        errors: of index keys, `[num_shifts, num_layers]`.
        rows: of the layers' other rows, the same.
        view: see `judge_rows`, like `shifts`.
    """
    if view.index_dtype is None:
        return
    limits = ROW_LIMITS[view.index_dtype]
    wrong = errors.isinf() | ((errors > limits.deeper) & (errors > _UNEXPLAINED * rows))
    wrong[:, 0] |= errors[:, 0] > limits.first
    for layer, at in wrong.T.nonzero().tolist()[:1]:
        error, limit = float(errors[at, layer]), limits.deeper if layer else limits.first
        raise ContractError(
            f"layer {view.start_layer + layer}: index keys moved by {shifts[at]} positions differ from keys computed "
            f"there by a relative L2 of {error:.2g}; allowed is {limit:.2g}. The indexer's rotation, its Hadamard "
            "transform or its places are not what was read from the model; serve without --radix-cache-backend pic."
        )


def _still_layers(errors: Tensor, limits: RowLimits) -> Tensor:
    """`[num_layers]`: whether keys are right at every shift if they are not rotated, and wrong at one if they are."""
    turned, unturned = (_wrong(errors[..., kinds], limits)[..., 0].any(dim=0) for kinds in ([0, 1], [2, 1]))
    still = turned & ~unturned
    # NOTE: if no layer turned, the pass would not have seen the positions that it was given.
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
    # Zeros are rows that were never written: two of them are no agreement.
    return relative_l2(actual, expected) if expected.any() else torch.inf
