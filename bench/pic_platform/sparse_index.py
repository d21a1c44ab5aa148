"""The indexer of sparse attention (DeepSeek-V3.2, GLM-5), which SGLang has for accelerators only, in plain PyTorch.

Each layer keeps a second, smaller key of every token. A query scores them with a few heads of its own and attends to
the `index_topk` tokens with the highest scores. As on an accelerator without fused writers, queries and keys go through
the Hadamard transform and are rounded to FP8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pic_kernels.index_pages import hadamard, place, quantise, read_keys, split_pages

from pic_platform.attention_plan import ExtendPlan
from sglang_pic.errors import UnsupportedError

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_BLOCK_QUERIES = 128


def install() -> None:
    """Replace the kernels of SGLang's indexers by the functions of this module; idempotent."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    BaseFusedOp.register_oot_forward(Indexer, choose_tokens, "native")


def check_indexer(name: str, indexer: Any) -> None:
    """Refuse an indexer that does more than take the highest scores.

    Raises:
        UnsupportedError: naming the layer and the property.
    """
    if type(indexer).__name__ != "Indexer" or indexer.num_init_tokens or indexer.num_local_tokens:
        raise UnsupportedError(
            f"{name!r} ({type(indexer).__name__}) pools keys, or takes the first or the last tokens whatever their "
            "scores are: the platform's indexer does neither; use a machine with an accelerator."
        )


def choose_tokens(
    indexer: Any,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    layer_id: int,
    return_indices: bool = True,
) -> torch.Tensor | None:
    """Write the index keys of a batch, and choose the tokens that each query attends to.

    Args:
        indexer: SGLang's module.
        x: Hidden states, `[num_tokens, hidden_size]`.
        q_lora: Input of the query projection, `[num_tokens, q_lora_rank]`.
        positions: `[num_tokens]`.
        forward_batch: The batch.
        layer_id: Of the layer.
        return_indices: Whether the tokens are wanted.

    Returns:
        Their numbers in the sequence, int32 `[num_tokens, index_topk]`, -1 behind the last one.
    """
    from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
    from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk

    query = indexer.wq_b(q_lora)[0].view(-1, indexer.n_heads, indexer.head_dim)
    key = indexer.k_norm(indexer.wk(x)[0]).unsqueeze(1)
    of_query, of_key = (each[..., : indexer.rope_head_dim].contiguous() for each in (query, key))
    turned = indexer.rotary_emb(positions, of_query, of_key)
    query, key = (
        hadamard(torch.cat((part.view_as(whole), each[..., indexer.rope_head_dim :]), dim=-1).float())
        for part, whole, each in zip(turned, (of_query, of_key), (query, key), strict=True)
    )
    pages = get_token_to_kv_pool().get_index_k_with_scale_buffer(layer_id=layer_id)
    at, (keys, scales), (numbers, factors) = place(forward_batch.out_cache_loc), split_pages(pages), quantise(key[:, 0])
    keys[at], scales[at] = numbers.view(torch.uint8), factors
    if not return_indices:
        return None
    numbers, factors = quantise(query)
    # In float32, as CUDA's product is of weights in bfloat16.
    shares = x.float() @ indexer.weights_proj.weight.float().T
    shares = shares * factors * (indexer.softmax_scale * indexer.n_heads**-0.5)
    plan: ExtendPlan | None = get_attn_backend().extend_plan
    chosen = torch.full((len(x), indexer.index_topk), -1, dtype=torch.int32)
    if plan is not None:
        # In float64, so that scores do not depend on the rest of the batch.
        _choose(numbers.double(), shares.double(), pages, plan, chosen)
    result: torch.Tensor | None = maybe_capture_indexer_topk(layer_id, chosen)
    return result


def _choose(
    query: torch.Tensor, shares: torch.Tensor, pages: torch.Tensor, plan: ExtendPlan, chosen: torch.Tensor
) -> None:
    """Write the chosen tokens of every query of a plan to `chosen`.

    Args:
        query: `[num_queries, num_heads, 128]` float64.
        shares: Of each head in a query's scores, `[num_queries, num_heads]` float64.
        pages: See `pic_kernels.index_pages`.
        plan: Of the batch.
        chosen: As `choose_tokens` returns it, full of -1.
    """
    for sequence in plan.sequences:
        slots = plan.rows[sequence.row][: sequence.prefix_len + sequence.query_len]
        keys = read_keys(pages, slots).double()
        for offset in range(0, sequence.query_len, _BLOCK_QUERIES):
            first = sequence.query_start + offset
            rows = slice(first, min(first + _BLOCK_QUERIES, sequence.query_start + sequence.query_len))
            scores = torch.einsum("qhd,kd->qhk", query[rows], keys).relu_()
            scores = torch.einsum("qhk,qh->qk", scores, shares[rows])
            last = sequence.prefix_len + offset + torch.arange(len(scores))
            scores.masked_fill_(torch.arange(len(slots)) > last[:, None], float("-inf"))
            # NOTE: where no head sees anything a score is 0. Of equal scores the first is taken, in any batch.
            best = scores.sort(dim=1, descending=True, stable=True)
            taken = best.indices.masked_fill(best.values == float("-inf"), -1)[:, : chosen.shape[1]]
            chosen[rows, : taken.shape[1]] = taken.to(torch.int32)
