"""Block-sparse attention in plain PyTorch, in the place of the kernels of SGLang's backend for MiniMax-M3.

An indexer scores the tokens before a query by keys of its own. A block's score is that of its best token; the query
attends to the best blocks, to the first ones and to those at its own position. Each KV head chooses for itself.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_pic.errors import UnsupportedError


def allow_pool() -> None:
    """Let SGLang build its pool for such models, which it does not do for platforms of others; idempotent."""
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.platforms.interface import reject_out_of_tree_path

    def reject(platform: Any, *, subsystem: str) -> None:
        if "MiniMax sparse-index" not in subsystem:
            reject_out_of_tree_path(platform, subsystem=subsystem)

    kv_cache_configurator.reject_out_of_tree_path = reject


def install() -> None:
    """Have SGLang's backend call these in this process; idempotent."""
    from sglang.srt.layers.attention.minimax_sparse_ops import minimax_sparse

    minimax_sparse.minimax_sparse_prefill = prefill
    minimax_sparse.minimax_sparse_decode = decode


def prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    _sink: None,
    idx_q: torch.Tensor,
    idx_k_cache: torch.Tensor,
    idx_v_cache: torch.Tensor | None,
    _idx_sink: None,
    req_to_token: torch.Tensor,
    slot_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    _max_seqlen_q: int,
    _max_seqlen_k: int,
    _block_size_q: int,
    block_size_k: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    **options: Any,
) -> tuple[None, torch.Tensor]:
    """`minimax_sparse_prefill`: its arguments are SGLang's.

    Returns:
        Nothing of the index values, and `[num_tokens, num_heads, head_dim]`.
    """
    _check(idx_v_cache, options)
    out = torch.empty_like(q)
    for row, start, length, prefix_len in zip(
        slot_ids.tolist(), cu_seqlens.tolist(), seq_lens.tolist(), prefix_lens.tolist(), strict=False
    ):
        slots, queries = req_to_token[row, :length].long(), slice(start, start + length - prefix_len)
        allowed = choose_blocks(
            *(idx_q[queries], idx_k_cache[slots], prefix_len, block_size_k),
            *(topk, init_blocks, local_blocks),
            num_kv_heads=k_cache.shape[1],
        )
        out[queries] = _attend(q[queries], k_cache[slots], v_cache[slots], allowed)
    return None, out


def decode(
    q: torch.Tensor,
    _sink: None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    idx_q: torch.Tensor,
    _idx_sink: None,
    idx_k_cache: torch.Tensor,
    idx_v_cache: torch.Tensor | None,
    req_to_token: torch.Tensor,
    slot_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen: int,
    _block_size_q: int,
    block_size_k: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    **options: Any,
) -> tuple[None, torch.Tensor]:
    """`minimax_sparse_decode`: one query for each sequence."""
    each = torch.arange(len(q) + 1)
    return prefill(
        *(q, k_cache, v_cache, None, idx_q, idx_k_cache, idx_v_cache, None, req_to_token, slot_ids),
        *(each, seq_lens, seq_lens - 1, 1, max_seqlen, 1, block_size_k, topk, init_blocks, local_blocks),
        **options,
    )


def choose_blocks(
    idx_q: torch.Tensor,
    idx_k: torch.Tensor,
    prefix_len: int,
    block_size: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    *,
    num_kv_heads: int,
) -> torch.Tensor:
    """The tokens that each query of a sequence attends to.

    Args:
        idx_q: `[num_queries, num_index_heads, index_dim]`.
        idx_k: `[num_keys, 1, index_dim]`, those of the queries are the last.
        prefix_len: Keys before the first query.
        block_size: Tokens of a block.
        topk: Blocks of a query, the next two included.
        init_blocks: Blocks from the first on that all queries attend to.
        local_blocks: Blocks up to its own that each query attends to.
        num_kv_heads: Each takes the blocks that any of its index heads chooses.

    Returns:
        `[num_kv_heads, num_queries, num_keys]` bool.
    """
    place = torch.arange(prefix_len, prefix_len + len(idx_q))[:, None]
    causal = torch.arange(len(idx_k))[None, :] <= place
    scores = torch.einsum("qhd,kd->hqk", idx_q.float(), idx_k[:, 0].float()).masked_fill(~causal, float("-inf"))
    num_blocks = -(-len(idx_k) // block_size)
    padded = torch.nn.functional.pad(scores, (0, num_blocks * block_size - len(idx_k)), value=float("-inf"))
    best = padded.unflatten(-1, (num_blocks, block_size)).amax(-1)
    block, own = torch.arange(num_blocks)[None, :], place // block_size
    forced = (block < init_blocks) | ((block > own - local_blocks) & (block <= own))
    best = best.masked_fill(forced & (block <= own), float("inf"))
    chosen = torch.zeros_like(best, dtype=torch.bool)
    chosen.scatter_(-1, best.topk(min(topk, num_blocks), dim=-1).indices, True)
    of_heads = chosen.unflatten(0, (num_kv_heads, -1)).any(1)
    return of_heads.repeat_interleave(block_size, dim=-1)[..., : len(idx_k)] & causal


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """`[num_queries, num_heads, head_dim]`; the heads that share a KV head attend to the same tokens."""
    grouped = query.float().unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys.float()) * query.shape[-1] ** -0.5
    shares = scores.masked_fill(~allowed[:, None], float("-inf")).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", shares, values.float()).flatten(1, 2).to(query.dtype)


def _check(index_values: torch.Tensor | None, options: dict[str, Any]) -> None:
    """Refuse arguments that the kernels take and these functions do not."""
    scaled = any(options.get(f"{part}_scale") not in (None, 1.0) for part in ("q", "k", "v", "idx_q", "idx_k"))
    if index_values is not None or scaled or options.get("score_type", "max") != "max":
        raise UnsupportedError(
            "Block-sparse attention with index values, scales or scores other than 'max' does not run on a CPU; use a "
            "machine with an accelerator."
        )
