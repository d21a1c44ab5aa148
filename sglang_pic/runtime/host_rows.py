"""SGLang's host pools (HiCache) as tensors of rows, beside `views` of the device's pools.

Whatever the layout, the rows of a layer lie at a fixed distance from one another within a page. So a layer is a flat
tensor of rows that begins at the layer's first one, and a host slot is an index into it, the same for all layers:

    layer_first         layer, slot           row of slot s: s
    page_first          slot, layer           row of slot s: s * layers
    page_first_direct   page, layer, slot     row of slot s: (s // page) * layers * page + s % page

Index keys of these slots lie in a pool beside it: as rows (`HostView.index_rows`), or a page of them together: page
after page of one layer, or those of all layers of one page. Layers with sliding windows that have a pool of their own
on the device have one here, too, with slots of its own (`HostView.windows`).

A draft has host pools of its own over the same slots, or its layers follow those of its target in the target's pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from pic_kernels.index_pages import PAGE_BYTES, PAGE_TOKENS
from torch import Tensor

from sglang_pic.errors import ContractError, Refused, UnsupportedError
from sglang_pic.runtime.views import PoolKind, PoolView

KNOWN_HOST_POOLS: Final = {
    # Keys wider than values.
    "AsymmetricMHATokenToKVPoolHost": PoolKind.MHA,
    "MHATokenToKVPoolHost": PoolKind.MHA,
    "MLATokenToKVPoolHost": PoolKind.MLA,
}
INDEX_HOST_POOL: Final = "DSAIndexerPoolHost"
INDEX_ROWS_HOST_POOL: Final = "MHATokenToKOnlyPoolHost"
LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct")
OTHER_LAYOUT: Final = Refused(
    "rows are not whole there", f"start with --hicache-mem-layout {', '.join(LAYOUTS[:-1])} or {LAYOUTS[-1]}"
)
OTHER_HOST_POOL: Final = Refused("how it stores rows is not known", "start without --enable-hierarchical-cache")


@dataclass(frozen=True, slots=True, eq=False)
class HostView:
    """The buffers of a host pool; they are the pool's own memory.

    Attributes:
        keys: per layer `[num_rows, num_kv_heads, head_dim]`, rows of all layers among them, as in `PoolView`.
        values: likewise; empty for MLA.
        page_size: slots of a page.
        page_rows: rows from one page to the next.
        slot_rows: rows from one slot of a page to the next.
        index: per layer the index keys `[num_pages, 1, PAGE_BYTES]`, pages of all layers among them, as in `PoolView`;
            of no length where a layer has none, empty where no layer has any.
        index_step: from the index keys of a page to those of the next, in pages.
        index_rows: the rows of `PoolView.index_rows` in the same slots, of no length where a layer has none; None if no
            layer has any.
        windows: the rows of the layers in `PoolView.windows`, in slots of their own. In the view that does not have a
            layer its rows are of no length. None if all layers are in one pool.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    page_size: int
    page_rows: int
    slot_rows: int
    index: tuple[Tensor, ...] = ()
    index_step: int = 1
    index_rows: HostView | None = None
    windows: HostView | None = None

    def rows(self, slots: Tensor) -> Tensor:
        """The rows of host slots, `[n]` int64 in host memory, as indices into `keys` and `values`."""
        if self.page_rows == self.page_size:
            return slots
        page = torch.div(slots, self.page_size, rounding_mode="floor")
        return page * self.page_rows + (slots - page * self.page_size) * self.slot_rows

    def index_slots(self, slots: Tensor) -> Tensor:
        """The same in `index`, as slots of its pages."""
        return slots + torch.div(slots, PAGE_TOKENS, rounding_mode="floor") * (PAGE_TOKENS * (self.index_step - 1))


def view_host_pool(
    host_pool: object, view: PoolView, index_pool: object | None = None, *, packed_at: int | None = None
) -> HostView:
    """The view of the host pool that backs the pool of `view`.

    Args:
        host_pool: of its rows.
        view: of the device's pool.
        index_pool: of its index keys, if it has any.
        packed_at: of a draft in its target's host pools, the place of its one layer behind the target's layers.

    Raises:
        UnsupportedError: the pool or its layout is not one whose rows can be read.
        ContractError: a supported pool does not look as it did when this was written.
    """
    pool: Any = host_pool
    name = type(pool).__name__
    if KNOWN_HOST_POOLS.get(name) is not view.kind:
        raise UnsupportedError(OTHER_HOST_POOL.line(f"the host pool {name}"))
    if pool.layout not in LAYOUTS:
        raise UnsupportedError(OTHER_LAYOUT.line(f"--hicache-mem-layout {pool.layout}"))
    layers, size = pool.layer_num, pool.size
    first = 0 if packed_at is None else pool.target_layer_num + packed_at
    if layers < first + view.num_layers or size % pool.page_size:
        raise ContractError(f"{name}: {layers} layers and {size} slots; this version was built for SGLang 0.5.23.")
    buffers = (pool.kv_buffer,) if view.kind is PoolKind.MLA else tuple(pool.kv_buffer)
    shapes = [each[0].shape[1:] for each in (view.keys, view.values) if each]
    keys, *values = (
        _by_layer(pool, buffer, shape, view.keys[0].dtype)[first:][: view.num_layers]
        for buffer, shape in zip(buffers, shapes, strict=True)
    )
    index, index_step = _view_index(index_pool, view, packed_at) if view.index else ((), 1)
    return HostView(
        keys,
        values[0] if values else (),
        *_steps(pool),
        index,
        index_step,
        _view_index_rows(index_pool, view) if view.index_rows else None,
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
        found = view_host_pool(host_pool, part, packed_at=packed_at)

    def spread(rows: tuple[Tensor, ...], here: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        of_layers = dict(zip(layers, rows, strict=True))
        return tuple(of_layers.get(layer, rows_here[:0]) for layer, rows_here in enumerate(here))

    return replace(found, keys=spread(found.keys, view.keys), values=spread(found.values, view.values))


def _steps(pool: Any) -> tuple[int, int, int]:
    """The slots of a page of a host pool, the rows from one page to the next, and from one slot of it to the next."""
    size = pool.page_size
    page_rows, slot_rows = {
        "layer_first": (size, 1),
        "page_first": (size * pool.layer_num, pool.layer_num),
        "page_first_direct": (size * pool.layer_num, 1),
    }[pool.layout]
    return size, page_rows, slot_rows


def _by_layer(pool: Any, buffer: Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The rows of each layer of a host pool's buffer: from the layer's first one on as many as the last layer has."""
    layers, size = pool.layer_num, pool.size
    if buffer.nbytes != size * layers * shape.numel() * dtype.itemsize:
        found = f"{type(pool).__name__}: {tuple(buffer.shape)} {buffer.dtype}"
        raise ContractError(f"{found} for rows of {tuple(shape)} {dtype}.")
    flat = buffer.view(dtype).view(size * layers, *shape)
    layer_rows = {"layer_first": size, "page_first": 1, "page_first_direct": pool.page_size}[pool.layout]
    num_rows = len(flat) - layer_rows * (layers - 1)
    return tuple(flat[layer_rows * layer :][:num_rows] for layer in range(layers))


def _view_index_rows(index_pool: Any, view: PoolView) -> HostView:
    """The view of the host pool of index keys that are rows, which has a layer for each one that has any."""
    name = type(index_pool).__name__
    if name != INDEX_ROWS_HOST_POOL:
        raise UnsupportedError(OTHER_HOST_POOL.line(f"the host pool {name} of index keys"))
    filled = [rows for rows in view.index_rows if rows is not None]
    if index_pool.layer_num != len(filled):
        raise ContractError(f"{name}: {index_pool.layer_num} layers; this version was built for SGLang 0.5.23.")
    found = _by_layer(index_pool, index_pool.k_buffer, filled[0].shape[1:], filled[0].dtype)
    layers = iter(found)
    return HostView(
        tuple(found[0][:0] if rows is None else next(layers) for rows in view.index_rows), (), *_steps(index_pool)
    )


def _view_index(index_pool: Any, view: PoolView, packed_at: int | None) -> tuple[tuple[Tensor, ...], int]:
    """The pages of each layer's index keys in their host pool, and the step from one page of a layer to the next.

    The host pool has a layer for each one that has any on the device, in their order.
    """
    name = type(index_pool).__name__
    if name != INDEX_HOST_POOL:
        raise UnsupportedError(OTHER_HOST_POOL.line(f"the host pool {name} of index keys"))
    filled = [layer for layer, pages in enumerate(view.index) if len(pages)]
    layers, pages, buffer = index_pool.layer_num, index_pool.indexer_page_num, index_pool.index_k_with_scale_buffer
    first = 0 if packed_at is None else index_pool.target_layer_num + packed_at
    if (
        layers < first + len(filled)
        or index_pool.page_size != PAGE_TOKENS
        or buffer.nbytes != layers * pages * PAGE_BYTES
    ):
        raise ContractError(
            f"{name}: {layers} layers of {pages} pages of {index_pool.page_size} tokens in {buffer.nbytes} bytes; this "
            "version was built for SGLang 0.5.23."
        )
    layer_pages, step = (pages, 1) if index_pool.layout == "layer_first" else (1, layers)
    flat = buffer.view(torch.float8_e4m3fn).view(layers * pages, 1, PAGE_BYTES)
    num_pages = len(flat) - layer_pages * (layers - 1)
    return tuple(
        flat[layer_pages * (first + filled.index(layer)) :][:num_pages] if layer in filled else flat[:0]
        for layer in range(view.num_layers)
    ), step
