"""SGLang's host pools (HiCache) as tensors of rows, beside `views` of the device's pools.

Whatever the layout, the rows of a layer lie at a fixed distance from one another within a page. So a layer is a flat
tensor of rows that begins at the layer's first one, and a host slot is an index into it, the same for all layers:

    layer_first         layer, slot           row of slot s: s
    page_first          slot, layer           row of slot s: s * layers
    page_first_direct   page, layer, slot     row of slot s: (s // page) * layers * page + s % page
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sglang_pic.errors import ContractError, Refused, UnsupportedError
from sglang_pic.runtime.views import PoolKind, PoolView

KNOWN_HOST_POOLS: Final = {"MHATokenToKVPoolHost": PoolKind.MHA, "MLATokenToKVPoolHost": PoolKind.MLA}
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
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    page_size: int
    page_rows: int
    slot_rows: int

    def rows(self, slots: Tensor) -> Tensor:
        """The rows of host slots, `[n]` int64 in host memory, as indices into `keys` and `values`."""
        if self.page_rows == self.page_size:
            return slots
        page = torch.div(slots, self.page_size, rounding_mode="floor")
        return page * self.page_rows + (slots - page * self.page_size) * self.slot_rows


def view_host_pool(host_pool: object, view: PoolView) -> HostView:
    """The view of the host pool that backs the pool of `view`.

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
    layers, page_size, size = pool.layer_num, pool.page_size, pool.size
    if layers < view.num_layers or size % page_size:
        raise ContractError(f"{name}: {layers} layers and {size} slots; this version was built for SGLang 0.5.23.")
    layer_rows, page_rows, slot_rows = {
        "layer_first": (size, page_size, 1),
        "page_first": (1, page_size * layers, layers),
        "page_first_direct": (page_size, page_size * layers, 1),
    }[pool.layout]
    buffers = (pool.kv_buffer,) if view.kind is PoolKind.MLA else tuple(pool.kv_buffer)
    shapes = [each[0].shape[1:] for each in (view.keys, view.values) if each]
    found = []
    for buffer, shape in zip(buffers, shapes, strict=True):
        if buffer.numel() != size * layers * shape.numel() or buffer.element_size() != view.dtype.itemsize:
            raise ContractError(
                f"{name}: {tuple(buffer.shape)} {buffer.dtype} for rows of {tuple(shape)} {view.dtype}."
            )
        flat = buffer.view(view.dtype).view(size * layers, *shape)
        # From each layer's first row on as many as the last one has.
        num_rows = len(flat) - layer_rows * (layers - 1)
        found.append(tuple(flat[layer_rows * layer :][:num_rows] for layer in range(view.num_layers)))
    keys, *values = found
    return HostView(keys, values[0] if values else (), page_size, page_rows, slot_rows)
