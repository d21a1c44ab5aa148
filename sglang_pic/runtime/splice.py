"""Copies KV rows between slots in all layers of a pool, with keys and index keys rotated by a shift."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from pic_kernels import (
    Backend,
    Choice,
    LayerBuffers,
    RopeParams,
    Source,
    choose_index,
    choose_mha,
    choose_mla,
    splice_index,
    splice_mha,
    splice_mla,
)
from torch import Tensor

from sglang_pic.errors import Refused, UnsupportedError
from sglang_pic.runtime.host_rows import HostView
from sglang_pic.runtime.rope import IndexRope, RopeGeometry
from sglang_pic.runtime.views import PoolKind, PoolView

logger = logging.getLogger(__name__)

UNFUSED_FETCH = Refused("only the fused kernel reads them", "start without --enable-hierarchical-cache")


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Layers of one pool that share one rotation."""

    rope: RopeParams
    keys: LayerBuffers
    values: LayerBuffers | None
    """None if `keys` are whole rows: latent rows or index keys."""
    layers: Sequence[int]
    """Their indices in the pool."""
    is_window: bool = False
    """Whether their rows are in the window pool."""
    is_index: bool = False
    """Whether `keys` are index keys."""


@dataclass(frozen=True, slots=True, eq=False)
class _IndexGroup:
    """Layers whose index keys have one rotation."""

    form: IndexRope
    pages: LayerBuffers
    layers: Sequence[int]


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
        self._host: tuple[HostView, Sequence[Source], Sequence[LayerBuffers]] | None = None
        self._bind(geometry)
        self._index = _index_groups(view, geometry)
        for group in self._groups:
            _log_choice(self._choose(group), len(group.keys), view.device)
        for each in self._index:
            _log_choice(choose_index(each.pages, each.form.rope), len(each.pages), view.device)

    def hold(self, layers: Sequence[int]) -> None:
        """Copy the keys of `layers`, indices into the pool, without rotation from now on; call before `bind_host`."""
        assert self._host is None, "the host's sources belong to the earlier groups"
        self._bind(self.geometry.holding(layers))

    def _bind(self, geometry: RopeGeometry) -> None:
        view, self.geometry = self.view, geometry
        self._groups = [
            _Group(
                rope=rope.to(view.device),
                keys=LayerBuffers([view.keys[index] for index in part], name="keys"),
                values=LayerBuffers([view.values[index] for index in part], name="values") if view.values else None,
                layers=part,
                is_window=is_window,
            )
            for rope, indices in geometry.groups()
            for is_window, part in _by_pool(view, indices)
        ]
        for rope, indices in geometry.groups() if view.index_rows else ():
            of_layers = {index: rows for index in indices if (rows := view.index_rows[index]) is not None}
            if of_layers:
                keys = LayerBuffers([*of_layers.values()], name="index keys")
                self._groups.append(_Group(rope.to(view.device), keys, None, [*of_layers], is_index=True))

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
        first = slice(len(windows)) if len(windows) < len(src) else slice(None)
        reads = [(windows, first) if group.is_window else (src, slice(None)) for group in self._groups]
        self._move(reads, dst, shifts)
        self._move_index(src, dst, shifts, [None] * len(self._index))

    def bind_host(self, host: HostView) -> None:
        """Set the host pool that `fetch` reads.

        Raises:
            UnsupportedError: the fused kernel, the only one that reads host memory, does not cover the pool's rows.
        """
        choices = [self._choose(group) for group in self._groups]
        choices += [choose_index(each.pages, each.form.rope) for each in self._index]
        if self.view.device.type != "cpu" and any(choice.backend is Backend.EAGER for choice in choices):
            raise UnsupportedError(UNFUSED_FETCH.line(f"rows of {self.view.dtype} in a host pool"))
        sources = []
        for group in self._groups:
            there = _part(host, group)
            keys = LayerBuffers([there.keys[layer] for layer in group.layers], name="host rows")
            values = [there.values[layer] for layer in group.layers] if group.values is not None else None
            sources.append(Source(keys, None if values is None else LayerBuffers(values, name="host rows")))
        index = [LayerBuffers([host.index[layer] for layer in each.layers], name="host index") for each in self._index]
        for each in (*index, *(part for source in sources for part in source if part is not None)):
            # Made here, because that waits for the device.
            each.addresses_on(self.view.device)
        self._host = host, sources, index

    def fetch(self, host_slots: Tensor, dst: Tensor, shifts: Tensor, windows: Tensor | None = None) -> None:
        """Copy rows of the host pool to `dst` in all layers, keys rotated by each token's shift.

        The kernel reads pinned host memory. The caller keeps the host slots locked until the queued work is done.

        Args:
            host_slots: `[n]` int64 slots of the host pool, in host memory; with `windows` of the last `n` of `dst`: of
                the others window rows alone are copied.
            dst: as in `splice`, likewise `shifts`.
            windows: one for each of `dst`, int64 slots of the host pool for windows, in host memory; needed where there
                is one.

        Raises:
            TypeError: as `splice`, likewise `ValueError`.
        """
        assert self._host is not None, "no host pool is bound"
        host, sources, index = self._host
        # Only beside windows may there be fewer of the other rows: the last ones.
        last = slice(None) if host.windows is None else slice(len(dst) - len(host_slots), None)
        reads = {}
        for each in {_part(host, group) for group in self._groups}:
            slots, part = (windows, slice(None)) if each is host.windows else (host_slots, last)
            assert slots is not None, "each row has a window row"
            reads[each] = _bring(each.rows(slots), dst.device), part
        self._move([reads[_part(host, group)] for group in self._groups], dst, shifts, sources)
        if self._index:
            self._move_index(_bring(host.index_slots(host_slots), dst.device), dst, shifts, index)

    def _move(
        self,
        reads: Sequence[tuple[Tensor, slice]],
        dst: Tensor,
        shifts: Tensor,
        sources: Sequence[Source | None] | None = None,
    ) -> None:
        """Move rows from the slots that each group reads to a part of `dst`."""
        if dst.numel() and self.view.device.type == "cpu" and shifts.numel():
            farthest = max(abs(int(bound)) for bound in shifts.aminmax())
            if farthest > self._max_shift:
                raise ValueError(f"shifts reach {farthest} tokens: must be within max_shift={self._max_shift!r}.")
        windows = None if self.view.windows is None else self.view.windows.slots[dst]
        for group, (src, part), source in zip(self._groups, reads, sources or [None] * len(reads), strict=True):
            every = windows if group.is_window else dst
            assert every is not None
            written, turned = every[part], shifts[part]
            if group.values is None:
                rope_offset = self.view.rope_offset
                splice_mla(group.keys, src, written, turned, group.rope, rope_offset=rope_offset, source=source)
            else:
                splice_mha(group.keys, group.values, src, written, turned, group.rope, source=source)

    def _move_index(self, src: Tensor, dst: Tensor, shifts: Tensor, sources: Sequence[LayerBuffers | None]) -> None:
        for each, source in zip(self._index, sources, strict=True):
            splice_index(each.pages, src, dst, shifts, each.form.rope, is_mixed=each.form.is_mixed, source=source)

    def rotary_part(self, layer: int) -> slice:
        """The dimensions of a key's row that a shift rotates, in the pool's layer `layer`."""
        start = self.view.read_rope_offset
        return slice(start, start + self.geometry.params[layer].rotary_dim)

    def _choose(self, group: _Group) -> Choice:
        if group.values is None:
            return choose_mla(group.keys, group.rope, rope_offset=self.view.rope_offset)
        return choose_mha(group.keys, group.values, group.rope)


def _part(host: HostView, group: _Group) -> HostView:
    """The view of the host's rows of a group."""
    found = host.index_rows if group.is_index else host.windows if group.is_window else host
    assert found is not None, "what has a pool on the device has one on the host"
    return found


def _bring(slots: Tensor, device: torch.device) -> Tensor:
    """Slots in host memory on `device`; copied from pinned memory, which does not block the host."""
    return slots if device.type == "cpu" else slots.pin_memory().to(device, non_blocking=True)


def _index_groups(view: PoolView, geometry: RopeGeometry) -> list[_IndexGroup]:
    """The index keys of a pool, by rotation; a layer that uses another layer's index has none."""
    filled = {layer for layer, pages in enumerate(view.index) if len(pages)}
    groups: dict[IndexRope, list[int]] = {}
    for layer, form in enumerate(geometry.index):
        if form is not None:
            groups.setdefault(form, []).append(layer)
    written = {layer for layers in groups.values() for layer in layers}
    if not written <= filled or bool(filled) > bool(written):
        found = f"{len(filled)} layers of index keys in the KV pool and {len(written)} with an indexer"
        raise UnsupportedError(Refused("each indexer must have pages of its own").line(found))
    return [
        _IndexGroup(
            IndexRope(form.rope.to(view.device), form.is_mixed),
            LayerBuffers([view.index[layer] for layer in layers], name="index pages"),
            layers,
        )
        for form, layers in groups.items()
    ]


def _by_pool(view: PoolView, indices: Sequence[int]) -> Iterator[tuple[bool, list[int]]]:
    """The layers outside the window pool, and those in it, each if there are any."""
    window = frozenset[int]() if view.windows is None else view.windows.layers
    for is_window in (False, True):
        part = [index for index in indices if (index in window) is is_window]
        if part:
            yield is_window, part


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
