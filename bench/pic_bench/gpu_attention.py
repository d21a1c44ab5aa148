"""Owns attention over a paged pool as `bench-prefill` needs it: the protocol of a backend, and the one in plain torch.

A pass is one request: virtual sequences that share a row of slots. A backend lays the pass out once (`plan`) and runs
it per layer. The torch backend gathers the row and calls `scaled_dot_product_attention` per sequence, which on a GPU
is the flash kernel; where that has no kernel for the dimensions, it attends in blocks of queries with a mask.

    heads, kv_heads     of the queries and of the pool's rows
    qk_dim, v_dim       of a query and of a value; with a latent 576 and 512, and the value is the row's first part
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pic_bench.gpu_extend import Extend
from sglang_pic.errors import UnsupportedError

__all__ = ["BACKENDS", "Attend", "AttentionBackend", "AttentionShape", "TorchAttention", "make_backend"]

BACKENDS: Final = ("torch", "triton", "flashinfer")

# Queries per block with a mask: bounds the scores of 16 heads over 32k keys in float32 to 512 MiB.
_BLOCK_QUERIES: Final = 256
# The widest head that the flash kernels of torch take.
_FLASH_DIM: Final = 256


class AttentionShape(NamedTuple):
    """What a backend must know of a layer; `latent` is 0 where values have a buffer of their own."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    scale: float
    latent: int
    dtype: torch.dtype


Attend = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`attend(query, keys, values)` of one layer.

Query `[num_tokens, heads, qk_dim]`, keys `[num_slots, kv_heads, qk_dim]`, values `[num_slots, kv_heads, v_dim]` or None
where they are the first `v_dim` dimensions of the keys; all contiguous. Returns `[num_tokens, heads, v_dim]`.
"""


class AttentionBackend(Protocol):
    """Causal attention of virtual sequences over one row."""

    name: str

    def plan(self, extend: Extend, slots: Tensor | None, shape: AttentionShape) -> Attend:
        """Lay a pass out; keys of position `p` lie in slot `slots[p]`, or in slot `p` where `slots` is None."""
        ...


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called `name`.

    Raises:
        UnsupportedError: what it needs is not here; the message says what.
    """
    if name == "torch":
        return TorchAttention()
    if find_spec(name) is None:
        raise UnsupportedError(f"attention backend {name}: the package is not installed here.")
    if name == "triton":
        from pic_bench import gpu_attention_triton

        if device.type != "cuda" and not gpu_attention_triton.IS_INTERPRETED:
            raise UnsupportedError("attention backend triton: needs a GPU, or TRITON_INTERPRET=1.")
        return gpu_attention_triton.TritonAttention()
    if device.type != "cuda":
        raise UnsupportedError(f"attention backend {name}: needs a GPU.")
    from pic_bench.gpu_attention_flashinfer import FlashInferAttention

    return FlashInferAttention(device)


class TorchAttention:
    """Gather, then `scaled_dot_product_attention`, one sequence after the other."""

    name = "torch"

    def plan(self, extend: Extend, slots: Tensor | None, shape: AttentionShape) -> Attend:
        """See `AttentionBackend`."""
        spans = list(zip(extend.prefix_lens, extend.seq_lens, strict=True))
        end = spans[-1][1]
        index = None if slots is None else slots[:end]

        def attend(query: Tensor, keys: Tensor, values: Tensor | None) -> Tensor:
            row_keys = keys[:end] if index is None else keys[index]
            row_values = row_keys[..., : shape.v_dim] if values is None else values[:end] if index is None else None
            if row_values is None:
                assert values is not None
                row_values = values[index]
            out = query.new_empty(query.shape[0], shape.heads, shape.v_dim)
            at = 0
            for prefix_len, seq_len in spans:
                num = seq_len - prefix_len
                out[at : at + num] = _attend(query[at : at + num], row_keys[:seq_len], row_values[:seq_len], shape)
                at += num
            return out

        return attend


def _attend(query: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> Tensor:
    """One sequence whose queries are the last ones of its keys."""
    if query.is_cuda and shape.qk_dim <= _FLASH_DIM:
        from torch.nn.attention.bias import causal_lower_right

        # The flash kernel wants values as wide as keys.
        wide = F.pad(values, (0, shape.qk_dim - shape.v_dim)) if shape.v_dim < shape.qk_dim else values
        result = F.scaled_dot_product_attention(
            _heads_first(query),
            _heads_first(keys),
            _heads_first(wide),
            attn_mask=causal_lower_right(len(query), len(keys)),
            scale=shape.scale,
            enable_gqa=shape.kv_heads != shape.heads,
        )
        return result[0].transpose(0, 1)[..., : shape.v_dim]
    blocks = []
    for start in range(0, len(query), _BLOCK_QUERIES):
        block = query[start : start + _BLOCK_QUERIES]
        end = len(keys) - len(query) + start + len(block)
        last = torch.arange(end - len(block), end, device=query.device)
        mask = torch.arange(end, device=query.device)[None, :] <= last[:, None]
        result = F.scaled_dot_product_attention(
            _heads_first(block),
            _heads_first(keys[:end]),
            _heads_first(values[:end]),
            attn_mask=mask,
            scale=shape.scale,
            enable_gqa=shape.kv_heads != shape.heads,
        )
        blocks.append(result[0].transpose(0, 1))
    return torch.cat(blocks)


def _heads_first(part: Tensor) -> Tensor:
    return part.transpose(0, 1)[None]
