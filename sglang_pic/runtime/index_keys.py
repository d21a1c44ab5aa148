"""Keys by which sparse attention chooses tokens, in the slots of the rows: their rotation, views and copies.

An indexer of DeepSeek-V3.2 or GLM-5 has pages of keys (`pic_kernels.index_pages`) and a rotary embedding of its own.
MiniMax-M3's keys are rows, rotated as its layer's keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, cast

import torch
from pic_kernels import Choice, RopeParams, Source, choose_index, splice_index
from pic_kernels.index_pages import PAGE_BYTES, PAGE_TOKENS
from torch import Tensor, nn

from sglang_pic.errors import ContractError, Refused, UnsupportedError
from sglang_pic.runtime.host_rows import OTHER_HOST_POOL, HostView, by_layer, steps
from sglang_pic.runtime.row_groups import RowGroup, Slots
from sglang_pic.runtime.views import MISSING, PoolView, refuse_layout, typed, view_plain

BLOCK_POOL: Final = "MiniMaxSparseKVPool"
"""Two plain pools: one of keys and values, one of the keys by which an indexer chooses blocks of tokens."""
INDEX_HOST_POOL: Final = "DSAIndexerPoolHost"
INDEX_ROWS_HOST_POOL: Final = "MHATokenToKOnlyPoolHost"
_OTHER_BLOCKS: Final = {
    "dense_pool": "layers without an indexer have a pool of their own",
    "index_kv_pool": "its indexer has values, which are not moved yet",
}


class _BlockPool(Protocol):
    """The attributes read of `BLOCK_POOL`."""

    main_pool: object
    dense_pool: object | None
    index_kv_pool: object | None
    index_k_pool: Any | None
    index_k_layer_id_mapping: dict[int, int]
    """By layer with an indexer: its index in `index_k_pool`."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexRope:
    """The rotation of an indexer's keys; layers that share one object are moved together."""

    rope: RopeParams
    """Of the keys' first dimensions."""
    is_mixed: bool
    """Whether the Hadamard transform of the whole key follows."""


class IndexRows(RowGroup):
    """Layers with one rotation whose index keys are rows."""

    def __init__(self, view: PoolView, layers: Sequence[int], rope: RopeParams) -> None:
        rows = cast("tuple[Tensor, ...]", view.index_rows)
        super().__init__(replace(view, keys=rows, values=()), layers, rope)

    def on_host(self, host: HostView) -> HostView:
        assert host.index is not None, "what has a pool on the device has one on the host"
        return host.index


class IndexPages(RowGroup):
    """Layers with one rotation whose index keys are pages."""

    def __init__(self, view: PoolView, layers: Sequence[int], form: IndexRope) -> None:
        super().__init__(replace(view, keys=view.index, values=()), layers, form.rope.to(view.device))
        self._is_mixed = form.is_mixed

    def choice(self) -> Choice:
        return choose_index(self.keys, self._rope)

    def on_host(self, host: HostView) -> HostView:
        assert host.index is not None, "what has a pool on the device has one on the host"
        return host.index

    def move(self, slots: Slots, source: Source | None = None) -> None:
        pages = None if source is None else source.keys
        splice_index(self.keys, *slots, self._rope, is_mixed=self._is_mixed, source=pages)


def index_rows_of(view: PoolView, layers: Sequence[int], rope: RopeParams) -> Iterator[RowGroup]:
    """The group of those layers with one rotation that have index keys as rows, if any has."""
    if having := [layer for layer in layers if view.index_rows and view.index_rows[layer] is not None]:
        yield IndexRows(view, having, rope)


def index_pages_of(view: PoolView, forms: Sequence[IndexRope | None]) -> list[RowGroup]:
    """The pages of index keys of a pool, by rotation; a layer that uses another layer's index has none.

    Raises:
        UnsupportedError: pool and model have different layers with an indexer.
    """
    filled = {layer for layer, pages in enumerate(view.index) if len(pages)}
    groups: dict[IndexRope, list[int]] = {}
    for layer, form in enumerate(forms):
        if form is not None:
            groups.setdefault(form, []).append(layer)
    written = {layer for layers in groups.values() for layer in layers}
    if not written <= filled or bool(filled) > bool(written):
        found = f"{len(filled)} layers of index keys in the KV pool and {len(written)} with an indexer"
        raise UnsupportedError(Refused("each indexer must have pages of its own").line(found))
    return [IndexPages(view, layers, form) for form, layers in groups.items()]


def find_indexers(attention: Iterable[tuple[nn.Module, Sequence[int]]]) -> dict[int, nn.Module]:
    """The indexer of every attention layer that has one of its own.

    Args:
        attention: the modules with an attention core, and the ids of their layers.
    """
    found: dict[int, nn.Module] = {}
    for parent, layer_ids in attention:
        for indexer in (child for child in parent.children() if "Indexer" in type(child).__name__):
            if type(indexer).__name__ != "Indexer":
                name = f"the indexer {type(indexer).__name__}"
                raise UnsupportedError(Refused("how it stores keys is not known").line(name))
            found |= dict.fromkeys(layer_ids, indexer)
    return found


def index_ropes(indexers: Mapping[int, nn.Module], ropes: Mapping[int, RopeParams]) -> dict[int, IndexRope]:
    """The rotation of every indexer, by layer; equal ones are one object.

    Args:
        indexers: by layer.
        ropes: by the `id` of a rotary module.
    """
    forms: dict[tuple[int, bool], IndexRope] = {}
    found = {}
    for layer, indexer in indexers.items():
        rope, is_mixed = ropes[id(indexer.rotary_emb)], _mixes(indexer)
        found[layer] = forms.setdefault((id(rope), is_mixed), IndexRope(rope, is_mixed))
    return found


def _mixes(indexer: nn.Module) -> bool:
    """Whether an indexer applies the Hadamard transform to its keys; its fused writers do not."""
    try:
        return not (indexer.use_dsa_indexer_fusion or indexer.use_aiter_fused_fp8_writer)
    except AttributeError as error:
        raise ContractError(f"Indexer.{error.name}: missing; this version was built for SGLang 0.5.23.") from error


def view_pages(kv_pool: Any) -> PoolView:
    """The view of a plain pool with pages of index keys, as FP8; `index_key_cache.buffer` has them by layer."""
    view, name = view_plain(kv_pool), type(kv_pool).__name__
    try:
        buffers: list[Tensor] = kv_pool.index_key_cache.buffer
    except AttributeError as error:
        raise ContractError(MISSING.format(f"{name}.{error.name}")) from error
    for layer, buffer in enumerate(buffers):
        if buffer.dtype != torch.uint8 or buffer.shape[1:] != (PAGE_BYTES,) or not buffer.is_contiguous():
            raise ContractError(
                f"{name}: index keys of layer {layer} are {tuple(buffer.shape)} {buffer.dtype}, not pages of "
                f"{PAGE_BYTES} bytes; this version was built for SGLang 0.5.23."
            )
    return replace(view, index=tuple(buffer.view(torch.float8_e4m3fn).unsqueeze(1) for buffer in buffers))


def view_blocks(pool: _BlockPool) -> PoolView:
    """The view of a pool with an index-key pool for some layers."""
    try:
        for attribute, reason in _OTHER_BLOCKS.items():
            if getattr(pool, attribute):
                raise UnsupportedError(Refused(reason).line(f"the KV pool {BLOCK_POOL} of {attribute}"))
        main, places = view_plain(pool.main_pool), pool.index_k_layer_id_mapping
        rows: tuple[Tensor, ...] = ()
        if pool.index_k_pool is not None:
            refuse_layout(pool.index_k_pool)
            shape = (main.num_slots, 1, pool.index_k_pool.head_dim)
            rows = typed(pool.index_k_pool, pool.index_k_pool.k_buffer, shape)
    except AttributeError as error:
        raise ContractError(MISSING.format(f"{BLOCK_POOL}.{error.name}")) from error
    layers = range(main.start_layer, main.start_layer + main.num_layers)
    if not rows:
        return main
    return replace(main, index_rows=tuple(rows[places[layer]] if layer in places else None for layer in layers))


def view_index_host_pool(index_pool: Any, view: PoolView, packed_at: int | None) -> HostView:
    """The view of the host pool of the index keys of `view`, which has a layer for each one that has any, in order.

    Raises:
        UnsupportedError: as `view_host_pool`, likewise `ContractError`.
    """
    name = type(index_pool).__name__
    if name != (INDEX_HOST_POOL if view.index else INDEX_ROWS_HOST_POOL):
        raise UnsupportedError(OTHER_HOST_POOL.line(f"the host pool {name} of index keys"))
    return (_pages_on_host if view.index else _rows_on_host)(index_pool, name, view, packed_at)


def _rows_on_host(index_pool: Any, name: str, view: PoolView, _: int | None) -> HostView:
    filled = [rows for rows in view.index_rows if rows is not None]
    if index_pool.layer_num != len(filled):
        raise ContractError(f"{name}: {index_pool.layer_num} layers; this version was built for SGLang 0.5.23.")
    found = by_layer(index_pool, index_pool.k_buffer, filled[0].shape[1:], filled[0].dtype)
    layers = iter(found)
    keys = tuple(found[0][:0] if rows is None else next(layers) for rows in view.index_rows)
    return HostView(keys, (), *steps(index_pool))


def _pages_on_host(index_pool: Any, name: str, view: PoolView, packed_at: int | None) -> HostView:
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
    keys = tuple(
        flat[layer_pages * (first + filled.index(layer)) :][:num_pages] if layer in filled else flat[:0]
        for layer in range(view.num_layers)
    )
    return HostView(keys, (), PAGE_TOKENS, PAGE_TOKENS * step, 1)
