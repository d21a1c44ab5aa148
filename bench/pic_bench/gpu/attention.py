"""Attention over a paged pool: the interface of a backend, and the backend in plain torch.

A backend lays a pass out once (`plan`) and then attends in every layer (`Attend`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pic_bench.gpu.passes import Extend

# Queries per block: bounds the scores of 16 heads over 32k keys in float32 to 512 MiB.
_BLOCK_QUERIES: Final = 256


class AttentionShape(NamedTuple):
    """The dimensions of a layer; `latent` is 0 where values have a buffer of their own, else as `v_dim`."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    latent: int
    scale: float
    dtype: torch.dtype


Attend = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`attend(query, keys, values)` of one layer.

Query `[num_tokens, heads, qk_dim]`, keys `[num_slots, kv_heads, qk_dim]`, values `[num_slots, kv_heads, v_dim]` or None
where they are the first `v_dim` dimensions of the keys; all contiguous. Returns `[num_tokens, heads, v_dim]`.
"""


class AttentionBackend(NamedTuple):
    """Causal attention of virtual sequences over one row."""

    name: str
    plan: Callable[[Extend, Tensor, AttentionShape], Attend]
    """`plan(extend, slots, shape)` lays a pass out; the keys of position `p` lie in slot `slots[p]`.

    Raises `UnsupportedError` for a shape that the backend does not cover."""


def _plan(extend: Extend, slots: Tensor, shape: AttentionShape) -> Attend:
    """Gather the row, then `scaled_dot_product_attention` of one sequence after the other, in blocks with a mask."""

    def attend(query: Tensor, keys: Tensor, values: Tensor | None) -> Tensor:
        row_keys = keys[slots]
        row_values = row_keys[..., : shape.v_dim] if values is None else values[slots]
        blocks, at = [], 0
        for start, end in zip(extend.prefix_lens, extend.seq_lens, strict=True):
            for first in range(start, end, _BLOCK_QUERIES):
                stop = min(first + _BLOCK_QUERIES, end)
                block = query[at : at + stop - first]
                blocks.append(_attend(block, row_keys[:stop], row_values[:stop], shape))
                at += stop - first
        return torch.cat(blocks)

    return attend


def _attend(query: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> Tensor:
    """Queries that are the last ones of their keys."""
    seen = torch.ones(len(query), len(keys), dtype=torch.bool, device=query.device).tril(len(keys) - len(query))
    heads_first = [part.transpose(0, 1)[None] for part in (query, keys, values)]
    result = F.scaled_dot_product_attention(
        heads_first[0],
        heads_first[1],
        heads_first[2],
        attn_mask=seen,
        scale=shape.scale,
        enable_gqa=shape.kv_heads != shape.heads,
    )
    return result[0].transpose(0, 1)


TORCH: Final = AttentionBackend("torch", _plan)
