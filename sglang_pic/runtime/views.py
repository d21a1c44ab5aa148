"""SGLang's KV pools as plain tensors, one row per token slot.

A pool is recognised by its exact class name, because nothing of SGLang is imported here. Subclasses of known pools are
refused: they change the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, cast

import torch
from pic_kernels.index_pages import PAGE_TOKENS, place, read_keys, split_pages
from torch import Tensor

from sglang_pic.errors import ContractError, Refused, UnsupportedError


class PoolKind(Enum):
    """The kind of a pool's rows."""

    MHA = "mha"
    """Keys and values per KV head, in separate buffers."""
    MLA = "mla"
    """One latent row, its last dimensions rotary."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowRows:
    """The layers with sliding windows, if these have a pool and slots of their own.

    SGLang allocates a slot for a token in both pools, and frees the one in the window pool earlier: when the token
    leaves the window, or that pool is short. The token's entry in `slots` is then 0, the padding slot.

    Attributes:
        layers: indices of these layers among all.
        slots: `[num_slots + 1]` int64, SGLang's own table, by slot of the pool of all other layers. The scheduler
            changes it on its own stream, so a donor's entries are read there, while the donor is locked.
        num_slots: slots per buffer, the padding page included.
    """

    layers: frozenset[int]
    slots: Tensor
    num_slots: int


@dataclass(frozen=True, slots=True, eq=False)
class PoolView:
    """The buffers of a KV pool; they are the pool's own memory, not copies.

    Attributes:
        kind: the kind of rows.
        keys: per layer `[num_slots, num_kv_heads, head_dim]`, or the latent rows `[num_slots, 1, row_dim]`.
        values: per layer `[num_slots, num_kv_heads, v_head_dim]`; empty for MLA.
        dtype: the rows' dtype; FP8 pools store bytes, viewed as FP8. Of scaled rows FP8, while `keys` are bfloat16.
        num_slots: slots per buffer, the padding page included; not of the buffers in `windows`.
        page_size: tokens per page of the allocator.
        rope_offset: first dimension of the rotary part: 0 for MHA, `kv_lora_rank` for MLA; of scaled rows in `keys`.
        rope_dim: dimensions from `rope_offset` on that may be rotary.
        start_layer: layer id of the first buffer (pipeline parallelism).
        index: per layer the pages of a sparse-attention indexer's keys (`pic_kernels.index_pages`), of length 0 if the
            layer has none; empty if no layer has any.
        index_rows: per layer the keys of another kind of indexer, `[num_slots, 1, index_dim]`, which are rotated as the
            layer's keys; None if the layer has none, empty if no layer has any.
        windows: the layers whose rows are in a second pool; None if there is one pool.
        num_scaled: of scaled latent rows, the FP8 values of each: these, a float32 scale for each `SCALED_TOGETHER` of
            them, and the rotary part in bfloat16. A splice copies the first two as they are; 0 for all other rows.
    """

    kind: PoolKind
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    dtype: torch.dtype
    num_slots: int
    page_size: int
    rope_offset: int
    rope_dim: int
    start_layer: int
    index: tuple[Tensor, ...] = ()
    index_rows: tuple[Tensor | None, ...] = ()
    windows: WindowRows | None = None
    num_scaled: int = 0

    @property
    def num_layers(self) -> int:
        """Layers of the pool on this rank."""
        return len(self.keys)

    @property
    def index_dtype(self) -> torch.dtype | None:
        """Dtype of the index keys; None if no layer has any."""
        if self.index:
            return torch.float8_e4m3fn
        return next((rows.dtype for rows in self.index_rows if rows is not None), None)

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.keys[0].device

    def fill(self, slots: Tensor, byte: int) -> None:
        """Set every byte of the rows of `slots`, in all layers."""
        for buffer, at in self.places(slots):
            buffer.view(torch.uint8)[at] = byte
        for pages in self.index:
            if len(pages):
                keys, scales = split_pages(pages)
                keys[place(slots)] = byte
                scales.view(torch.uint8).unflatten(1, (PAGE_TOKENS, 4))[place(slots)] = byte

    def places(self, slots: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Every buffer of every layer but pages of index keys, each with the indices of the rows of `slots` in it."""
        for layer in range(self.num_layers):
            for buffer in self._buffers(layer):
                yield buffer, self._slots_in(layer, slots)
        for rows in self.index_rows:
            if rows is not None:
                yield rows, slots

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, ...]:
        """The rows of `slots` in one of the layers, in float64: keys and values, or the latent rows without scales."""
        # By bytes, because FP8 has no gather on every device.
        rows = (buffer.view(torch.uint8)[self._slots_in(layer, slots)] for buffer in self._buffers(layer))
        if self.num_scaled:
            return tuple(map(self._unscaled, rows))
        return tuple(part.view(self.dtype).to(torch.float64) for part in rows)

    def _unscaled(self, rows: Tensor) -> Tensor:
        values, scales, rotary = rows.split(
            (self.num_scaled, self.num_scaled // SCALED_TOGETHER * 4, 2 * self.rope_dim), dim=-1
        )
        wide = values.contiguous().view(torch.float8_e4m3fn).to(torch.float64).unflatten(-1, (-1, SCALED_TOGETHER))
        latent = wide * scales.contiguous().view(torch.float32).to(torch.float64).unsqueeze(-1)
        return torch.cat((latent.flatten(-2), rotary.contiguous().view(torch.bfloat16).to(torch.float64)), dim=-1)

    def _buffers(self, layer: int) -> tuple[Tensor, ...]:
        return (self.keys[layer], self.values[layer]) if self.values else (self.keys[layer],)

    def _slots_in(self, layer: int, slots: Tensor) -> Tensor:
        return self.windows.slots[slots] if self.windows is not None and layer in self.windows.layers else slots

    def read_index(self, layer: int, slots: Tensor) -> Tensor | None:
        """The index keys of `slots` in a layer, as stored, in float64; `None` if it has none."""
        rows = self.index_rows[layer] if self.index_rows else None
        if rows is not None:
            return rows.view(torch.uint8)[slots].view(rows.dtype).to(torch.float64)
        has_any = bool(self.index) and len(self.index[layer]) > 0
        return read_keys(self.index[layer], slots).to(torch.float64) if has_any else None


def view_plain(kv_pool: object) -> PoolView:
    """The view of a pool without windows and index keys; it may have no layers if it is one of two.

    Raises:
        UnsupportedError: as `view_pool`, likewise `ContractError`.
    """
    name = type(kv_pool).__name__
    kind = KNOWN_POOLS.get(name)
    if kind is None:
        raise UnsupportedError(_refusal(kv_pool))
    pool = cast(_Pool, kv_pool)
    refuse_layout(pool)
    values: tuple[Tensor, ...]
    try:
        num_slots, page_size, start_layer = pool.size + pool.page_size, pool.page_size, pool.start_layer
        num_scaled = pool.kv_lora_rank if getattr(pool, "dsa_kv_cache_store_fp8", False) else 0
        if num_scaled:
            rope_dim, values = pool.qk_rope_head_dim, ()
            keys = _scaled(pool, num_slots)
            rope_offset = keys[0].shape[-1] - rope_dim if keys else 0
        elif kind is PoolKind.MLA:
            rope_offset, rope_dim = pool.kv_lora_rank, pool.qk_rope_head_dim
            keys = typed(pool, pool.kv_buffer, (num_slots, 1, rope_offset + rope_dim))
            values = ()
        else:
            rope_offset, rope_dim = 0, pool.head_dim
            keys = typed(pool, pool.k_buffer, (num_slots, pool.head_num, pool.head_dim))
            values = typed(pool, pool.v_buffer, (num_slots, pool.head_num, pool.v_head_dim))
    except AttributeError as error:
        raise ContractError(MISSING.format(f"{name}.{error.name}")) from error
    return PoolView(
        kind=kind,
        keys=keys,
        values=values,
        dtype=pool.dtype,
        num_slots=num_slots,
        page_size=page_size,
        rope_offset=rope_offset,
        rope_dim=rope_dim,
        start_layer=start_layer,
        num_scaled=num_scaled,
    )


MISSING: Final = "{}: missing; this version was built for SGLang 0.5.23."
KNOWN_POOLS: Final = {
    "DSATokenToKVPool": PoolKind.MLA,
    "MHATokenToKVPool": PoolKind.MHA,
    "MLATokenToKVPool": PoolKind.MLA,
}
_KEEP_ALL_ROWS: Final = "start with --disable-hybrid-swa-memory, which keeps all rows"
OTHER_ROWS: Final = Refused("no kernel rotates them", "start with --kv-cache-dtype auto or fp8_e4m3")
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)

SCALED_TOGETHER: Final = 128
"""Values of a scaled row that have one scale."""
SCALED_OTHERWISE: Final = "use --kv-cache-dtype bfloat16"
_FP8: Final = "use --kv-cache-dtype auto or fp8_e4m3"
_PLAIN_ROWS: Final = "unset SGLANG_USE_HND_KVCACHE and the layout flags"

REFUSED_POOLS: Final = {
    "BaseSWAKVPool": Refused("rows outside sliding windows are dropped", _KEEP_ALL_ROWS),
    "MHATokenToKOnlyPool": Refused("it holds no values"),
    "MHATokenToKVPoolFP4": Refused("FP4 rows cannot be rotated", _FP8),
    "MHATokenToKVPoolMXFP8": Refused("block-scaled rows cannot be rotated", _FP8),
    "MiniMaxM3Nvfp4KVPool": Refused("NVFP4 rows cannot be rotated", _FP8),
    "MLATokenToKVPoolFP4": Refused("FP4 rows cannot be rotated", _FP8),
    "NoOpMHATokenToKVPool": Refused("it keeps no rows"),
    "PageInterleaveKVPoolMixin": Refused("its pages are spread over ranks", "remove --enable-kv-cache-sharding"),
    "PageMajorMHATokenToKVPool": Refused("its rows lie layer by layer within a page", "unset the page-major layout"),
    "SWAKVPool": Refused("rows outside sliding windows are dropped", _KEEP_ALL_ROWS),
    "UnifiedMHATokenToKVPool": Refused("its slots are translated on every access", "remove --enable-unified-memory"),
    "UnifiedMLATokenToKVPool": Refused("its slots are translated on every access", "remove --enable-unified-memory"),
}
UNKNOWN_POOL: Final = Refused("how it stores rows is not known")

# Attributes that show another layout of a known class, with their values in the plain one.
PLAIN_LAYOUT: Final[tuple[tuple[str, tuple[object, ...], Refused], ...]] = (
    ("kv_cache_layout", ("nhd",), Refused("rows must be [slot, head, dim]", _PLAIN_ROWS)),
    ("use_hnd", (False,), Refused("rows must be [slot, head, dim]", _PLAIN_ROWS)),
    ("is_quantized_kv_cache", (False,), Refused("block-quantised rows cannot be rotated", _FP8)),
    (
        "post_capture_active",
        (False,),
        Refused("buffers are replaced after graph capture", "unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
    ),
    ("index_kpool", (1,), Refused("a pooled index key belongs to several tokens, so it will never be moved")),
    ("index_page_size", (PAGE_TOKENS,), Refused("index keys must lie in pages of 64 tokens")),
    (
        "layer_shard_enabled",
        (False,),
        Refused("KV-cache sharding spreads layers over ranks", "remove --enable-kv-cache-sharding"),
    ),
    ("kv_scale_buffer", (None,), Refused("block-scaled rows cannot be rotated", _FP8)),
)


class _Pool(Protocol):
    """The attributes read of a pool; K and V for MHA, the latent for MLA."""

    size: int
    page_size: int
    start_layer: int
    dtype: torch.dtype
    head_num: int
    head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    k_buffer: list[Tensor]
    v_buffer: list[Tensor]
    kv_buffer: list[Tensor]


def _refusal(kv_pool: object) -> str:
    name = f"the KV pool {type(kv_pool).__name__}"
    bases = [base.__name__ for base in type(kv_pool).__mro__]
    for base in bases:
        if base in REFUSED_POOLS:
            return REFUSED_POOLS[base].line(name)
    parents = [base for base in bases[1:] if base in KNOWN_POOLS]
    return UNKNOWN_POOL.line(f"{name}, a {parents[0]} with a layout of its own" if parents else name)


def refuse_layout(pool: _Pool) -> None:
    """Refuse a plain pool that lays its rows out in another way, or stores another dtype."""
    name = f"the KV pool {type(pool).__name__}"
    for attribute, plain, refused in PLAIN_LAYOUT:
        value = getattr(pool, attribute, plain[0])
        if value not in plain:
            raise UnsupportedError(refused.line(f"{name} of {attribute}={value!r}"))
    if pool.dtype not in _DTYPES:
        raise UnsupportedError(OTHER_ROWS.line(f"{name} with rows of {str(pool.dtype).removeprefix('torch.')}"))


def typed(pool: _Pool, buffers: list[Tensor], shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The buffers in the pool's dtype, checked to be of `shape` and contiguous."""
    name = type(pool).__name__
    for layer, buffer in enumerate(buffers):
        if tuple(buffer.shape) != shape or not buffer.is_contiguous():
            found = f"layer {layer} of shape {tuple(buffer.shape)!r}, strides {buffer.stride()!r} in the KV pool {name}"
            raise UnsupportedError(Refused(f"rows must be contiguous, {shape!r}", _PLAIN_ROWS).line(found))
        if buffer.element_size() != pool.dtype.itemsize:
            raise ContractError(f"KV pool {name}: layer {layer} stores {buffer.dtype} for rows of {pool.dtype}.")
    return tuple(buffer if buffer.dtype == pool.dtype else buffer.view(pool.dtype) for buffer in buffers)


def _scaled(pool: _Pool, num_slots: int) -> tuple[Tensor, ...]:
    """The buffers of scaled rows as bfloat16: a row's FP8 values and scales are an even number of bytes.

    `quantize_k_cache_separate` of SGLang writes them.
    """
    row_bytes = pool.kv_lora_rank + pool.kv_lora_rank // SCALED_TOGETHER * 4 + 2 * pool.qk_rope_head_dim
    for layer, buffer in enumerate(pool.kv_buffer):
        if buffer.nbytes != num_slots * row_bytes or buffer.element_size() != 1 or not buffer.is_contiguous():
            found = f"scaled FP8 rows of shape {tuple(buffer.shape)!r} in layer {layer} of {type(pool).__name__}"
            raise UnsupportedError(Refused(f"rows must have {row_bytes} bytes", SCALED_OTHERWISE).line(found))
    return tuple(buffer.view(torch.bfloat16) for buffer in pool.kv_buffer)
