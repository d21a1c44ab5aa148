"""The views of SGLang's pools, on the device and on the host, whatever kinds of rows they have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_pic.errors import Refused, UnsupportedError
from sglang_pic.runtime.host_rows import HostView, view_plain_host_pool
from sglang_pic.runtime.index_keys import BLOCK_POOL, view_blocks, view_index_host_pool, view_pages
from sglang_pic.runtime.views import PoolView, view_plain
from sglang_pic.runtime.window_pool import WINDOW_POOL, view_window_pool


def view_pool(kv_pool: object) -> PoolView:
    """The view of SGLang's KV pool.

    Args:
        kv_pool: `model_runner.token_to_kv_pool`, with its final buffers.

    Raises:
        UnsupportedError: rows of this pool, layout or dtype cannot be moved.
        ContractError: a supported pool lacks an attribute, or stores another dtype.
    """
    name, pool = type(kv_pool).__name__, kv_pool
    kinds: dict[str, Any] = {WINDOW_POOL: view_window_pool, BLOCK_POOL: view_blocks}
    view: PoolView = kinds.get(name, view_pages if getattr(pool, "use_dsa", False) else view_plain)(pool)
    if not view.keys:
        raise UnsupportedError(Refused("it holds no layer").line(f"the KV pool {name}"))
    return view


def view_host_pool(
    host_pool: object, view: PoolView, index_pool: object | None = None, *, packed_at: int | None = None
) -> HostView:
    """The view of the host pool that backs the pool of `view`, if that has no windows in a pool of their own.

    Args:
        host_pool: of its rows.
        view: of the device's pool.
        index_pool: of its index keys, if it has any.
        packed_at: of a draft in its target's host pools, the place of its one layer behind the target's layers.

    Raises:
        UnsupportedError: the pool or its layout is not one whose rows can be read.
        ContractError: a supported pool does not look as it did when this was written.
    """
    found = view_plain_host_pool(host_pool, view, packed_at=packed_at)
    if not (view.index or view.index_rows):
        return found
    return replace(found, index=view_index_host_pool(index_pool, view, packed_at))
