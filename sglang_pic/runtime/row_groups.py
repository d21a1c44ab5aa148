"""Layers of a pool whose rows are copied together, because they share one rotation.

This is the group of ordinary rows; rows of another kind are a subclass in the module of the kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pic_kernels import Choice, LayerBuffers, RopeParams, Source, choose_rows, splice_rows
from torch import Tensor

from sglang_pic.runtime.host_rows import HostView
from sglang_pic.runtime.views import PoolView


class Copy(NamedTuple):
    """One call of `Splicer.splice` or `Splicer.fetch`."""

    src: Tensor
    dst: Tensor
    shifts: Tensor
    """As long as `dst`."""
    windows: Tensor | None
    """Slots in the pool for windows, if there is one, whose rows go to the first of `dst`."""
    start: int = 0
    """The rows of `src` go to the slots from here on."""


class Slots(NamedTuple):
    """The part of a copy that one group takes."""

    src: Tensor
    dst: Tensor
    shifts: Tensor


class RowGroup:
    """Layers with one rotation whose rows are in the slots of the pool.

    Args:
        view: of the pool.
        layers: their indices in the pool.
        rope: on the pool's device.
    """

    def __init__(self, view: PoolView, layers: Sequence[int], rope: RopeParams) -> None:
        self.layers, self._rope, self._rope_offset = layers, rope, view.rope_offset
        self.keys = LayerBuffers([view.keys[layer] for layer in layers], name="keys")
        values = [view.values[layer] for layer in layers] if view.values else None
        # None if `keys` are whole rows.
        self._values = None if values is None else LayerBuffers(values, name="values")

    def choice(self) -> Choice:
        """The kernel of the group."""
        return choose_rows(self.keys, self._values, self._rope, rope_offset=self._rope_offset)

    def on_host(self, host: HostView) -> HostView:
        """The view of the host's rows of the group."""
        return host

    def source(self, host: HostView) -> Source:
        """The buffers of these rows in `on_host`."""
        keys = LayerBuffers([host.keys[layer] for layer in self.layers], name="host rows")
        values = None if self._values is None else [host.values[layer] for layer in self.layers]
        return Source(keys, None if values is None else LayerBuffers(values, name="host rows"))

    def slots(self, copy: Copy) -> Slots:
        """The part of a copy that the group takes."""
        return Slots(copy.src, copy.dst[copy.start :], copy.shifts[copy.start :])

    def move(self, slots: Slots, source: Source | None = None) -> None:
        """Queue the copy; it reads `source`, if that is given, in the place of the pool."""
        splice_rows(self.keys, self._values, *slots, self._rope, rope_offset=self._rope_offset, source=source)
