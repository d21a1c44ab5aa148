"""Copies KV rows between slots in all layers of a pool, with keys and index keys rotated by a shift."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from pic_kernels import Backend, Choice
from torch import Tensor

from sglang_pic.errors import Refused, UnsupportedError
from sglang_pic.runtime.index_keys import index_pages_of, index_rows_of
from sglang_pic.runtime.rope import RopeGeometry
from sglang_pic.runtime.row_groups import Copy, RowGroup
from sglang_pic.runtime.views import PoolKind, PoolView
from sglang_pic.runtime.window_pool import groups_of

logger = logging.getLogger(__name__)


class Splicer:
    """Copies KV rows between slots of one pool. One per model runner; not thread-safe."""

    def __init__(self, view: PoolView, geometry: RopeGeometry) -> None:
        """Bind the layers of `view` to their rotations.

        Raises:
            UnsupportedError: pool and model have different layers, or a rotary part does not fit a row.
        """
        pool_ids = tuple(range(view.start_layer, view.start_layer + view.num_layers))
        if pool_ids != geometry.layer_ids:
            found = f"layers {_span(pool_ids)} in the KV pool and {_span(geometry.layer_ids)} with a rotary embedding"
            raise UnsupportedError(Refused("they must be the same").line(found))
        for rope, _ in geometry.groups():
            fits = rope.rotary_dim == view.rope_dim if view.kind is PoolKind.MLA else rope.rotary_dim <= view.rope_dim
            if not fits:
                found = f"rotary_dim={rope.rotary_dim!r} in {view.kind.value} rows"
                raise UnsupportedError(Refused(f"their rotary part has {view.rope_dim!r} dimensions").line(found))
        for layer, rows in enumerate(view.index_rows):
            if rows is not None and geometry.params[layer].rotary_dim > rows.shape[2]:
                found = f"rotary_dim={geometry.params[layer].rotary_dim!r} in index keys"
                raise UnsupportedError(Refused(f"they have {rows.shape[2]!r} dimensions").line(found))
        self.view = view
        self._max_shift = geometry.max_shift
        self._bind(geometry)
        for group in self.groups:
            _log_choice(group.choice(), len(group.keys), view.device)

    def hold(self, layers: Sequence[int]) -> None:
        """Copy the keys of `layers`, indices into the pool, without rotation; call before a `Fetcher` is made."""
        self._bind(self.geometry.holding(layers))

    def _bind(self, geometry: RopeGeometry) -> None:
        view, self.geometry = self.view, geometry
        ropes = [(rope.to(view.device), layers) for rope, layers in geometry.groups()]
        self.groups: Sequence[RowGroup] = [
            *(group for rope, layers in ropes for group in groups_of(view, layers, rope)),
            *(group for rope, layers in ropes for group in index_rows_of(view, layers, rope)),
            *index_pages_of(view, geometry.index),
        ]

    def splice(self, src: Tensor, dst: Tensor, shifts: Tensor, windows: Tensor | None = None) -> None:
        """Copy the rows of `src` to `dst` in all layers, keys rotated by each token's shift.

        The caller has locked the donors of `src` and owns `dst`; every row of `src` was written in all layers (loads
        from a host are done). Work is queued on the current stream; on a CPU it is done on return. Cost O(n) per
        layer; `n = 0` does nothing.

        Args:
            src: `[n]` int64 slots, on the pool's device.
            dst: `[n]` int64 slots, each once, none of them in `src`.
            shifts: `[n]` int32 or int64 tokens, target position minus source position, within `max_shift`.
            windows: `[m]` int64, the slots in the window pool of the first `m` of `src`, read while the donors were
                locked; window rows of the others are not copied. By default those of all, looked up when the copy runs,
                as those of `dst` are.

        Raises:
            TypeError: a wrong dtype.
            ValueError: shapes or devices differ, or, on a CPU only, slots are out of bounds, repeated in `dst`
                or shared by both, or a shift exceeds `max_shift`. Nothing was written. On an accelerator values are
                not checked: reading them back would stall the stream.
        """
        if windows is None:
            windows = src if self.view.windows is None else self.view.windows.slots[src]
        self.check_shifts(dst, shifts)
        for group in self.groups:
            group.move(group.slots(Copy(src, dst, shifts, windows)))

    def check_shifts(self, dst: Tensor, shifts: Tensor) -> None:
        """Refuse, on a CPU only, a shift of more than `max_shift`: ValueError."""
        if dst.numel() and self.view.device.type == "cpu" and shifts.numel():
            farthest = max(abs(int(bound)) for bound in shifts.aminmax())
            if farthest > self._max_shift:
                raise ValueError(f"shifts reach {farthest} tokens: must be within max_shift={self._max_shift!r}.")

    def rotary_part(self, layer: int) -> slice:
        """The dimensions of a key's row, as `PoolView.read` returns it, that a shift rotates in the pool's `layer`."""
        start = self.view.num_scaled or self.view.rope_offset
        return slice(start, start + self.geometry.params[layer].rotary_dim)


def _log_choice(choice: Choice, num_layers: int, device: torch.device) -> None:
    """Log the kernel of a group; warn if an accelerator has no fused one."""
    if choice.backend is Backend.EAGER and device.type != "cpu":
        logger.warning(
            "sglang_pic: splices of %d layers run in eager torch, not in the fused kernel: %s",
            num_layers,
            choice.reason,
        )
    else:
        logger.info("sglang_pic: splices of %d layers run on: %s", num_layers, choice.backend.value)


def _span(layer_ids: tuple[int, ...]) -> str:
    if layer_ids == tuple(range(layer_ids[0], layer_ids[-1] + 1)):
        return f"[{layer_ids[0]}, {layer_ids[-1] + 1})"
    return repr(list(layer_ids))
