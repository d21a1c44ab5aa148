"""SGLang's host pools (HiCache) as tensors of rows, beside `views` of the device's pools.

Whatever the layout, the rows of a layer lie at a fixed distance from one another within a page. So a layer is a flat
tensor of rows that begins at the layer's first one, and a host slot is an index into it, the same for all layers:

    layer_first         layer, slot           row of slot s: s
    page_first          slot, layer           row of slot s: s * layers
    page_first_direct   page, layer, slot     row of slot s: (s // page) * layers * page + s % page

Index keys lie in a pool beside it, as rows or pages. Layers with sliding windows that have a pool of their own on the
device have one here, too, with slots of its own.

A draft has host pools of its own over the same slots, or its layers follow those of its target in the target's pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sglang_pic.errors import ContractError, Refused, UnsupportedError
from sglang_pic.runtime.views import PoolKind, PoolView

KNOWN_HOST_POOLS: Final = {
    # Keys wider than values.
    "AsymmetricMHATokenToKVPoolHost": PoolKind.MHA,
    "MHATokenToKVPoolHost": PoolKind.MHA,
    "MLATokenToKVPoolHost": PoolKind.MLA,
}
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
        index: the index keys in the same slots, as rows or pages, of no length where a layer has none; None if no layer
            has any.
        windows: the rows of the layers in `PoolView.windows`, in slots of their own. In the view that does not have a
            layer its rows are of no length. None if all layers are in one pool.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    page_size: int
    page_rows: int
    slot_rows: int
    index: HostView | None = None
    windows: HostView | None = None

    def rows(self, slots: Tensor) -> Tensor:
        """The rows of host slots, `[n]` int64 in host memory, as indices into `keys` and `values`."""
        if self.page_rows == self.page_size:
            return slots
        page = torch.div(slots, self.page_size, rounding_mode="floor")
        return page * self.page_rows + (slots - page * self.page_size) * self.slot_rows


def view_plain_host_pool(host_pool: object, view: PoolView, *, packed_at: int | None = None) -> HostView:
    """The view of the host pool of the rows of `view`; arguments and errors as those of `view_host_pool`."""
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
        by_layer(pool, buffer, shape, view.keys[0].dtype)[first:][: view.num_layers]
        for buffer, shape in zip(buffers, shapes, strict=True)
    )
    return HostView(keys, values[0] if values else (), *steps(pool))


def steps(pool: Any) -> tuple[int, int, int]:
    """The slots of a page of a host pool, the rows from one page to the next, and from one slot of it to the next."""
    size = pool.page_size
    page_rows, slot_rows = {
        "layer_first": (size, 1),
        "page_first": (size * pool.layer_num, pool.layer_num),
        "page_first_direct": (size * pool.layer_num, 1),
    }[pool.layout]
    return size, page_rows, slot_rows


def by_layer(pool: Any, buffer: Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The rows of each layer of a host pool's buffer: from the layer's first one on as many as the last layer has."""
    layers, size = pool.layer_num, pool.size
    if buffer.nbytes != size * layers * shape.numel() * dtype.itemsize:
        found = f"{type(pool).__name__}: {tuple(buffer.shape)} {buffer.dtype}"
        raise ContractError(f"{found} for rows of {tuple(shape)} {dtype}.")
    flat = buffer.view(dtype).view(size * layers, *shape)
    layer_rows = {"layer_first": size, "page_first": 1, "page_first_direct": pool.page_size}[pool.layout]
    num_rows = len(flat) - layer_rows * (layers - 1)
    return tuple(flat[layer_rows * layer :][:num_rows] for layer in range(layers))
