"""Where the keys of a batch lie: page-table lookups, done once per forward pass and used by every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch

_MIN_FILL = 0.75
"""A decode group is padded to its longest sequence; no member is shorter than this share of it."""

_MAX_GROUP_SLOTS = 65_536
"""Bounds the copy of keys and values that one decode group makes per layer."""


class ExtendSequence(NamedTuple):
    """One sequence of an extend batch: queries `[query_start, query_start + query_len)` behind `prefix_len` keys."""

    row: int
    """Index into `ExtendPlan.rows`."""

    query_start: int
    query_len: int
    prefix_len: int


@dataclass(slots=True, frozen=True)
class ExtendPlan:
    """An extend batch; sequences that share a row of the page table share one lookup."""

    rows: list[torch.Tensor]
    """Per distinct row: slots of its tokens from 0 to the longest sequence on it, int64 `[num_tokens]`."""

    sequences: list[ExtendSequence]
    num_queries: int
    trees: list[torch.Tensor] | None = None
    """Per sequence which of its own keys each query sees, bool `[query_len, query_len]`; None where it sees those
    before it and itself."""


@dataclass(slots=True, frozen=True)
class DecodeGroup:
    """Sequences of a decode batch of similar length, computed together."""

    members: torch.Tensor
    """Positions in the batch, int64 `[num_members]`."""

    slots: torch.Tensor
    """int64 `[num_members, longest]`; behind its own length a member repeats its first slot."""

    padding: torch.Tensor | None
    """True where `slots` is padding, bool `[num_members, longest]`; None where there is none."""


def plan_extend(
    page_table: torch.Tensor, table_rows: torch.Tensor, prefix_lens: torch.Tensor, extend_lens: torch.Tensor
) -> ExtendPlan:
    """Look up the slots of an extend batch.

    Args:
        page_table: `req_to_token`, integer `[num_rows, max_tokens]`.
        table_rows: Row of each sequence, `[num_sequences]`; virtual sequences of one request name the same row.
        prefix_lens: Keys before the first query of each sequence.
        extend_lens: Queries of each sequence; their own keys follow the prefix.
    """
    numbers = list(zip(table_rows.tolist(), prefix_lens.tolist(), extend_lens.tolist(), strict=True))
    longest: dict[int, int] = {}
    for table_row, prefix_len, extend_len in numbers:
        longest[table_row] = max(longest.get(table_row, 0), prefix_len + extend_len)
    index_of = {table_row: index for index, table_row in enumerate(longest)}
    ends = list(accumulate(extend_len for _, _, extend_len in numbers))
    sequences = [
        ExtendSequence(index_of[table_row], end - extend_len, extend_len, prefix_len)
        for (table_row, prefix_len, extend_len), end in zip(numbers, ends, strict=True)
        if extend_len > 0
    ]
    rows = [page_table[table_row, :length].long() for table_row, length in longest.items()]
    return ExtendPlan(rows, sequences, ends[-1] if ends else 0)


def plan_verify(
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    num_nodes: int,
    tree_mask: torch.Tensor,
) -> ExtendPlan:
    """Look up the slots of a batch that verifies one tree of tokens behind each sequence.

    Args:
        page_table: `req_to_token`, integer `[num_rows, max_tokens]`.
        table_rows: Row of each sequence, `[num_sequences]`.
        prefix_lens: Keys before each tree, `[num_sequences]`.
        num_nodes: Queries of each tree.
        tree_mask: Which keys each query sees, bool, flat: per sequence and query a row of `prefix_len + num_nodes`.
            It ends before the sequences that a batch is padded with, where ranks gather tokens.
    """
    plan = plan_extend(page_table, table_rows, prefix_lens, torch.full_like(prefix_lens, num_nodes))
    trees, start = [], 0
    for sequence in plan.sequences:
        end = start + num_nodes * (sequence.prefix_len + num_nodes)
        if end <= len(tree_mask):
            trees.append(tree_mask[start:end].view(num_nodes, -1)[:, sequence.prefix_len :])
        else:
            trees.append(torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril())
        start = end
    return replace(plan, trees=trees)


def plan_draft(
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    step: int,
    window: int | None = None,
    chunk: int | None = None,
) -> list[DecodeGroup]:
    """Look up the slots of one step of a draft that goes on in `topk` branches behind each sequence.

    ```
    row of the page table:  | 0 ... (seq_len) | branch 0: num_steps | branch 1: num_steps | ...
    keys of branch b:         [ 0, seq_len )  + the first `step + 1` of branch b
    ```

    Args:
        page_table: `req_to_token`, integer `[num_rows, max_tokens]`.
        table_rows: Row of each sequence, `[num_sequences]`.
        seq_lens: Keys before the draft, `[num_sequences]`.
        topk: Branches of each sequence; the batch has `num_sequences * topk` queries.
        num_steps: Slots of a branch.
        step: From 0.
        window: As in `plan_decode`.
        chunk: As there.
    """
    if topk == 1:
        return plan_decode(page_table, table_rows, seq_lens + step + 1, window, chunk)
    rows, lengths = table_rows.long().repeat_interleave(topk), seq_lens.long().repeat_interleave(topk)
    branch = torch.arange(len(rows)) % topk
    own = torch.arange(step + 1)[None, :]
    slots = page_table[rows, : int(lengths.max()) + step + 1]
    slots.scatter_(1, lengths[:, None] + own, page_table[rows[:, None], (lengths + branch * num_steps)[:, None] + own])
    return plan_decode(slots, torch.arange(len(rows)), lengths + step + 1, window, chunk)


def plan_decode(
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int | None = None,
    chunk: int | None = None,
) -> list[DecodeGroup]:
    """Look up the slots of a decode batch, grouped so that padding wastes little.

    Args:
        page_table: `req_to_token`, integer `[num_rows, max_tokens]`.
        table_rows: Row of each sequence, `[num_sequences]`.
        seq_lens: Keys of each sequence, its own included, all above 0.
        window: Keys before its own that a query sees; None for all.
        chunk: Positions that attend to each other only, counted from 0; None for all.
    """
    seq_lens = seq_lens.long()
    num_seen = seq_lens if window is None else seq_lens.clamp(max=window + 1)
    if chunk is not None:
        num_seen = (seq_lens - 1) % chunk + 1
    lengths = num_seen.tolist()
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        group = groups[-1] if groups else []
        longest = lengths[group[0]] if group else 0
        if group and lengths[index] >= _MIN_FILL * longest and (len(group) + 1) * longest <= _MAX_GROUP_SLOTS:
            group.append(index)
        else:
            groups.append([index])
    return [_plan_group(page_table, table_rows, seq_lens, num_seen, torch.tensor(group)) for group in groups]


def _plan_group(
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    num_seen: torch.Tensor,
    members: torch.Tensor,
) -> DecodeGroup:
    lengths = num_seen[members]
    place = torch.arange(int(lengths.max()))[None, :]
    position = seq_lens[members][:, None] - lengths[:, None] + place
    slots = page_table[table_rows[members].long()[:, None], position.clamp(max=page_table.shape[1] - 1)].long()
    padding = place >= lengths[:, None]
    if not bool(padding.any()):
        return DecodeGroup(members, slots, None)
    # NOTE: a padded entry must name a slot that was written: a masked key adds nothing, but 0 * NaN is NaN.
    return DecodeGroup(members, torch.where(padding, slots[:, :1], slots), padding)
