"""Slots of speculative decoding, which SGLang looks up and moves with Triton kernels, in plain PyTorch.

Signatures and layouts are SGLang's (`kernels/ops/speculative`, `mem_cache/allocation.py`), which calls these in the
place of its kernels. A request's row of the page table names its slots in the order of its tokens.
"""

from __future__ import annotations

import torch


def slots_between(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: object,
) -> torch.Tensor:
    """The slots `[start, end)` of each request's row, one request behind the other.

    Args:
        req_pool_indices: Row of each request, `[batch_size]`.
        req_to_token: The page table.
        start_offset: `[batch_size]`.
        end_offset: `[batch_size]`.
        batch_size: Requests.
        draft_token_num: Not used; the offsets tell.
        device: Not used.

    Returns:
        int64, as long as all spans together.
    """
    del batch_size, draft_token_num, device
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    return req_to_token[rows, columns].long()


def draft_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Fill `out_cache_loc` with the `topk * num_cols` slots behind each sequence.

    Args:
        req_pool_indices: Row of each request, `[batch_size]`.
        req_to_token: The page table.
        seq_lens: `[batch_size]`.
        out_cache_loc: `[batch_size * topk * num_cols]`, written in place.
        topk: Branches of a draft.
        num_cols: Slots of a branch.
        positions: None here: only CUDA asks for positions.
        mrope: None here.
    """
    assert positions is None, "SGLang asks for positions on CUDA only"
    assert mrope is None, "SGLang asks for positions on CUDA only"
    rows, columns = _cells(req_pool_indices, seq_lens, seq_lens + topk * num_cols)
    out_cache_loc.copy_(req_to_token[rows, columns])


def assign_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write new slots into `[start, end)` of each request's row.

    Args:
        req_pool_indices: Row of each request, `[batch_size]`.
        req_to_token: The page table, written in place.
        start_offset: `[batch_size]`.
        end_offset: `[batch_size]`.
        out_cache_loc: The slots of all requests, one behind the other.
        batch_size: Requests.
    """
    del batch_size
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: len(rows)].to(req_to_token.dtype)


def accepted_slots(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor, size: int
) -> None:
    """Pack the slots of the kept nodes to the front of `accept_out_cache_loc`.

    Args:
        accept_index: Numbers of the kept nodes in the batch, -1 behind each path, `[num_trees, max_depth + 1]`.
        out_cache_loc: The slot of each node of the batch.
        accept_out_cache_loc: `[size]`, written in place.
        size: Of `accept_index`.
    """
    del size
    kept = accept_index.flatten()
    kept = kept[kept >= 0].long()
    accept_out_cache_loc[: len(kept)] = out_cache_loc[kept]


def front_slots(num_front: torch.Tensor, out_cache_loc: torch.Tensor, front_out_cache_loc: torch.Tensor) -> None:
    """Pack the first slots of each tree to the front of `front_out_cache_loc`.

    Args:
        num_front: How many of each tree, `[num_trees]`.
        out_cache_loc: The slot of each node of the batch, as many for every tree.
        front_out_cache_loc: Written in place.
    """
    window = out_cache_loc.view(len(num_front), -1)
    front = window[torch.arange(window.shape[1])[None, :] < num_front[:, None]]
    front_out_cache_loc[: len(front)] = front


def bonus_tokens(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """The last kept token of each tree.

    Args:
        accept_tokens: `[batch_size, accept_stride]`, flat or not.
        accept_lens: Kept tokens of each tree, 1 or more, `[batch_size]`.
        bonus_tokens: `[batch_size]`, written in place.
        accept_stride: Entries of a tree in `accept_tokens`.
        batch_size: Trees.
    """
    tokens = accept_tokens.view(batch_size, accept_stride)
    bonus_tokens.copy_(tokens.gather(1, accept_lens.long()[:, None] - 1)[:, 0])


def shift_tokens(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Move each sequence's tokens one place to the front, and put a new one at its end.

    Args:
        input_ids: `[num_tokens]`, written in place.
        extend_start_loc: Where each sequence begins, `[batch_size]`.
        extend_seq_lens: Tokens of each sequence, `[batch_size]`.
        topk_index: The new tokens, `[batch_size]` or `[batch_size, 1]`.
        select_index: Where the new tokens are put, `[batch_size]`; by default the last place of each sequence.

    Returns:
        `input_ids`.
    """
    for start, length in zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True):
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
    ends = extend_start_loc + extend_seq_lens - 1 if select_index is None else select_index
    input_ids[ends[extend_seq_lens > 0].long()] = topk_index.flatten()[extend_seq_lens > 0].to(input_ids.dtype)
    return input_ids


def _cells(table_rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = (ends - starts).long()
    firsts = lengths.cumsum(0) - lengths
    columns = torch.arange(int(lengths.sum())) - (firsts - starts.long()).repeat_interleave(lengths)
    return table_rows.long().repeat_interleave(lengths), columns
