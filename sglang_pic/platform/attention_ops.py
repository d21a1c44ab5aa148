"""Causal attention over a paged KV pool in plain PyTorch: extend and decode, grouped-query and latent.

The query heads that share a KV head are laid out as rows of one query block, so that keys and values are never
repeated, and each block of queries attends to exactly the keys up to its last position. Swept on an x86 server CPU with
AVX512-BF16, 2 cores: this layout costs nothing on long extends and makes a decode step in bf16 five times faster than
`enable_gqa`. The latent row is passed as its own value, which keeps torch on its tiled kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_pic.platform.attention_plan import DecodeGroup, ExtendPlan

_MAX_BLOCK_QUERIES = 128
_MIN_BLOCK_QUERIES = 16
_MAX_BLOCK_ROWS = 1024


class CausalMask:
    """Additive lower-right-aligned causal masks as views of one buffer, which grows to the longest sequence seen.

    ```
    buffer row of query i:  | 0 ... 0 (length)        | 0 .. 0 at i | -inf .. |
    view for prefix p:              [ length - p, length + block )
    ```
    """

    def __init__(self, group_size: int, dtype: torch.dtype) -> None:
        """Make an empty mask.

        Args:
            group_size: Query heads per KV head; each query has that many rows.
            dtype: Of the queries.
        """
        self.block_len = max(_MIN_BLOCK_QUERIES, min(_MAX_BLOCK_QUERIES, _MAX_BLOCK_ROWS // group_size))
        self._group_size = group_size
        self._dtype = dtype
        self._length = 0
        self._buffer = torch.empty(0)

    def view(self, num_queries: int, prefix_len: int) -> torch.Tensor | None:
        """The mask of `num_queries` queries behind `prefix_len` keys.

        Returns:
            `[num_queries * group_size, prefix_len + num_queries]`; None for one query, which sees every key.
        """
        if num_queries == 1:
            return None
        if prefix_len > self._length or self._buffer.numel() == 0:
            self._grow(max(prefix_len, 2 * self._length))
        start = self._length - prefix_len
        return self._buffer[: num_queries * self._group_size, start : self._length + num_queries]

    def tree(self, visible: torch.Tensor, prefix_len: int) -> torch.Tensor:
        """The mask of queries that see the whole prefix and some of their own keys.

        Args:
            visible: bool, `[num_queries, num_queries]`.
            prefix_len: Keys before them.

        Returns:
            `[num_queries * group_size, prefix_len + num_queries]`.
        """
        bias = torch.zeros(len(visible), prefix_len + len(visible), dtype=self._dtype)
        bias[:, prefix_len:].masked_fill_(~visible, float("-inf"))
        return bias.repeat_interleave(self._group_size, dim=0)

    def _grow(self, length: int) -> None:
        block = torch.full((self.block_len, self.block_len), float("-inf"), dtype=self._dtype).triu_(1)
        rows = self.block_len * self._group_size
        self._buffer = torch.zeros(rows, length + self.block_len, dtype=self._dtype)
        self._buffer[:, length:] = block.repeat_interleave(self._group_size, dim=0)
        self._length = length


def attend_extend(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor | None,
    plan: ExtendPlan,
    mask: CausalMask,
    scaling: float,
    out: torch.Tensor,
) -> None:
    """Attention of new tokens whose keys are in the pool already.

    Each sequence is computed on its own, in blocks of `mask.block_len` queries: its result does not depend on what else
    is in the batch, and memory stays bounded by the longest sequence.

    Args:
        query: `[num_queries, num_heads, key_dim]`.
        key_pool: `[num_slots, num_kv_heads, key_dim]`, any dtype that converts to the query's.
        value_pool: `[num_slots, num_kv_heads, value_dim]`; None where the value is the first part of the key row (MLA).
        plan: Of the same batch.
        mask: For `num_heads // num_kv_heads` and the query's dtype.
        scaling: Factor of the scores.
        out: `[num_queries, num_heads, value_dim]`, written in place.
    """
    gathered = [_gather(slots, key_pool, value_pool, query.dtype) for slots in plan.rows]
    if plan.trees is not None:
        for sequence, tree in zip(plan.sequences, plan.trees, strict=True):
            keys, values = gathered[sequence.row]
            rows = slice(sequence.query_start, sequence.query_start + sequence.query_len)
            bias = mask.tree(tree, sequence.prefix_len)
            _attend(query[rows][None], keys[None], values[None], bias, scaling, out[rows][None])
        return
    for sequence in plan.sequences:
        keys, values = gathered[sequence.row]
        for offset in range(0, sequence.query_len, mask.block_len):
            block_len = min(mask.block_len, sequence.query_len - offset)
            start, prefix_len = sequence.query_start + offset, sequence.prefix_len + offset
            num_keys = prefix_len + block_len
            rows = slice(start, start + block_len)
            _attend(
                query[rows][None],
                keys[None, :num_keys],
                values[None, :num_keys],
                mask.view(block_len, prefix_len),
                scaling,
                out[rows][None],
            )


def attend_decode(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor | None,
    groups: list[DecodeGroup],
    scaling: float,
    out: torch.Tensor,
) -> None:
    """Attention of one new token per sequence; arguments as in `attend_extend`."""
    for group in groups:
        keys, values = _gather(group.slots, key_pool, value_pool, query.dtype)
        bias = None
        if group.padding is not None:
            bias = torch.zeros(group.padding.shape, dtype=query.dtype).masked_fill_(group.padding, float("-inf"))
            bias = bias[:, None, None, :]
        result = torch.empty(len(group.members), 1, *out.shape[1:], dtype=out.dtype)
        _attend(query[group.members][:, None], keys, values, bias, scaling, result)
        out[group.members] = result[:, 0]


def _gather(
    slots: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `slots`, both `[*slots.shape, num_kv_heads, key_dim]`: zeros fill narrower values."""
    keys = key_pool[slots].to(dtype)
    if value_pool is None:
        return keys, keys
    values = value_pool[slots].to(dtype)
    if values.shape[-1] < keys.shape[-1]:
        values = F.pad(values, (0, keys.shape[-1] - values.shape[-1]))
    return keys, values


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    out: torch.Tensor,
) -> None:
    """One block: query `[batch, num_queries, num_heads, key_dim]`, keys `[batch, num_keys, num_kv_heads, key_dim]`."""
    batch, num_queries, num_heads, key_dim = query.shape
    num_kv_heads = keys.shape[2]
    group_size = num_heads // num_kv_heads
    folded = query.view(batch, num_queries, num_kv_heads, group_size, key_dim).permute(0, 2, 1, 3, 4)
    result = F.scaled_dot_product_attention(
        folded.reshape(batch, num_kv_heads, num_queries * group_size, key_dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=bias,
        scale=scaling,
    )
    value_dim = out.shape[-1]
    unfolded = result[..., :value_dim].view(batch, num_kv_heads, num_queries, group_size, value_dim)
    out.view(batch, num_queries, num_kv_heads, group_size, value_dim).copy_(unfolded.permute(0, 2, 1, 3, 4))
