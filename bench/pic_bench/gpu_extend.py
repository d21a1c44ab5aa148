"""Owns one pass as a layout: which tokens are computed, in which virtual sequences, over which row of slots.

It must not know models or kernels. The layout of a gap prefill is the server's own: `build_gap_batch` of the adapter
makes it, here as there, from a plan and its donors' slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_pic.adapter.serve.gap_batch import Splice, build_gap_batch
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.core import Plan

__all__ = ["Extend", "gap_extend", "whole_extend"]


@dataclass(frozen=True, slots=True)
class Extend:
    """One request's pass.

    Attributes:
        input_ids: `[num_tokens]` int64, the computed tokens, in order.
        positions: `[num_tokens]` int64.
        row: `[end]` int64, the slots of the whole prompt.
        out_slots: `[num_tokens]` int64, where their KV goes.
        prefix_lens: per virtual sequence, tokens of the row before its first.
        seq_lens: per virtual sequence, tokens of the row up to and with its last.
        splice: rows to move before the pass; None where nothing is spliced.
    """

    input_ids: Tensor
    positions: Tensor
    row: Tensor
    out_slots: Tensor
    prefix_lens: list[int]
    seq_lens: list[int]
    splice: Splice | None

    @property
    def num_tokens(self) -> int:
        """Tokens that the pass computes."""
        return sum(self.seq_lens) - sum(self.prefix_lens)


def whole_extend(tokens: Tensor, row: Tensor, prefix_len: int) -> Extend:
    """Everything behind an exact prefix, as one sequence.

    Args:
        tokens: `[n]` int64, the prompt, on the row's device.
        row: `[n]` int64.
        prefix_len: tokens of the row that are computed already; 0 for a full prefill.
    """
    n = len(tokens)
    positions = torch.arange(prefix_len, n, device=row.device)
    return Extend(tokens[prefix_len:], positions, row, row[prefix_len:], [prefix_len], [n], None)


def gap_extend(tokens: Tensor, row: Tensor, plan: Plan, donor_slots: Sequence[Tensor]) -> Extend:
    """The gaps of a plan as virtual sequences, and the splice of its runs.

    Args:
        tokens: `[n]` int64, the prompt, on the row's device.
        row: `[n]` int64.
        plan: of the whole prompt.
        donor_slots: per run, the slots that it is read from.
    """
    start, num_new = plan.prefix_len, plan.end - plan.prefix_len
    pending = PendingSplice(plan=plan, slots=list(donor_slots), locks=[])
    batch = build_gap_batch([pending], [start], [num_new], [num_new], [row], row.device)
    kept = batch.kept + start
    return Extend(tokens[kept], kept, row, row[kept], batch.prefix_lens, batch.seq_lens, batch.splice)
