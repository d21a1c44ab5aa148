"""Layers with sliding windows whose rows have a pool and slots of their own: their views, and how they are copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, Protocol

from pic_kernels import RopeParams
from torch import Tensor

from sglang_pic.errors import ContractError, Refused, UnsupportedError
from sglang_pic.runtime.host_rows import HostView, view_plain_host_pool
from sglang_pic.runtime.row_groups import Copy, RowGroup, Slots
from sglang_pic.runtime.views import MISSING, PoolKind, PoolView, WindowRows, view_plain

WINDOW_POOL: Final = "SWAKVPool"
"""Two plain pools: one for layers with sliding windows, one for all others."""
_OTHER_WINDOWS: Final = {
    "swa_req_ring_size": "windows are a ring of each request, and the tree keeps none of their rows",
    "request_window": "windows are rows of each request, and the tree keeps none of them",
    "swa_uses_full_indices": "its windows have no slots of their own",
}


class _WindowPool(Protocol):
    """The attributes read of `WINDOW_POOL`."""

    layer_num: int
    full_kv_pool: object
    swa_kv_pool: object
    layers_mapping: dict[int, tuple[int, bool]]
    """By layer: its index in its pool, and whether that is the window pool."""
    full_to_swa_index_mapping: Tensor


class WindowGroup(RowGroup):
    """Layers with one rotation whose rows are in the pool for windows."""

    def __init__(self, view: PoolView, layers: Sequence[int], rope: RopeParams) -> None:
        super().__init__(view, layers, rope)
        assert view.windows is not None, "the layers have a pool of their own"
        self._slots = view.windows.slots

    def on_host(self, host: HostView) -> HostView:
        assert host.windows is not None, "what has a pool on the device has one on the host"
        return host.windows

    def slots(self, copy: Copy) -> Slots:
        assert copy.windows is not None, "each row has a window row"
        first = slice(len(copy.windows))
        return Slots(copy.windows, self._slots[copy.dst[first]], copy.shifts[first])


def groups_of(view: PoolView, layers: Sequence[int], rope: RopeParams) -> Iterator[RowGroup]:
    """The groups of layers with one rotation: those outside the pool for windows, and those in it, if there are any."""
    windows = frozenset[int]() if view.windows is None else view.windows.layers
    if others := [layer for layer in layers if layer not in windows]:
        yield RowGroup(view, others, rope)
    if inside := [layer for layer in layers if layer in windows]:
        yield WindowGroup(view, inside, rope)


def view_window_pool(pool: _WindowPool) -> PoolView:
    """The view of a pool with a window pool, in the order of the model's layers.

    Raises:
        UnsupportedError: as `view_pool`, likewise `ContractError`.
    """
    try:
        for attribute, reason in _OTHER_WINDOWS.items():
            if getattr(pool, attribute):
                raise UnsupportedError(Refused(reason).line(f"the KV pool {WINDOW_POOL} of {attribute}"))
        whole, window = view_plain(pool.full_kv_pool), view_plain(pool.swa_kv_pool)
        layers, slots = [pool.layers_mapping[layer] for layer in range(pool.layer_num)], pool.full_to_swa_index_mapping
    except AttributeError as error:
        raise ContractError(MISSING.format(f"{WINDOW_POOL}.{error.name}")) from error
    except KeyError as error:
        raise UnsupportedError(Refused("it lacks a layer").line(f"the KV pool {WINDOW_POOL}")) from error
    if whole.kind is not PoolKind.MHA or window.kind is not PoolKind.MHA or whole.dtype != window.dtype:
        found = f"{whole.kind.value} rows of {whole.dtype} beside windows of {window.kind.value} rows of {window.dtype}"
        raise UnsupportedError(Refused("both must have keys and values of one dtype").line(found))
    parts = [(window if is_window else whole, index) for index, is_window in layers]
    return replace(
        whole,
        keys=tuple(part.keys[index] for part, index in parts),
        values=tuple(part.values[index] for part, index in parts),
        rope_dim=min((part.rope_dim for part, _ in parts), default=0),
        windows=WindowRows(
            layers=frozenset(layer for layer, (_, is_window) in enumerate(layers) if is_window),
            slots=slots,
            num_slots=window.num_slots,
        ),
    )


def view_window_host_pools(
    host_pool: object, window_pool: object, view: PoolView, *, packed_at: tuple[int, int] | None = None
) -> HostView:
    """The view of both host pools that back the pools of `view`, of which one is for sliding windows.

    Args:
        host_pool: of all other layers.
        window_pool: of the layers with windows.
        view: of the device's pools.
        packed_at: as for `view_host_pool`, in each of the host pools.

    Raises:
        UnsupportedError: as `view_host_pool`, likewise `ContractError`.
    """
    assert view.windows is not None, "there is one pool"
    windows = [layer for layer in range(view.num_layers) if layer in view.windows.layers]
    others = [layer for layer in range(view.num_layers) if layer not in view.windows.layers]
    whole, window = packed_at or (None, None)
    return replace(
        _view_layers(host_pool, view, others, whole), windows=_view_layers(window_pool, view, windows, window)
    )


def _view_layers(host_pool: object, view: PoolView, layers: Sequence[int], packed_at: int | None) -> HostView:
    """The view of a host pool of some layers, with rows of no length for all others."""
    keys, values = (tuple(each[layer] for layer in layers) for each in (view.keys, view.values))
    found = HostView((), (), 1, 1, 1)
    if layers:
        part = replace(view, keys=keys, values=values, windows=None)
        found = view_plain_host_pool(host_pool, part, packed_at=packed_at)

    def spread(rows: tuple[Tensor, ...], here: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        of_layers = dict(zip(layers, rows, strict=True))
        return tuple(of_layers.get(layer, rows_here[:0]) for layer, rows_here in enumerate(here))

    return replace(found, keys=spread(found.keys, view.keys), values=spread(found.values, view.values))
