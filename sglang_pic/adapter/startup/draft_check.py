"""The start-up check of rows for draft models: their passes are run as SGLang's workers run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_pic.adapter.serve.forward import attach_gap_batch
from sglang_pic.adapter.serve.gap_batch import GapBatch
from sglang_pic.adapter.sglang.seams import BuildContext, ForwardBatch
from sglang_pic.adapter.startup.drafts import Draft
from sglang_pic.adapter.startup.row_check import Bench, check_live_rows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DraftBench(Bench):
    """`Bench` of a draft model."""

    spec_info: Callable[[torch.Tensor], Any]
    """The `spec_info` of a batch of these tokens."""

    def batch(self, tokens: torch.Tensor, written: torch.Tensor, position: int) -> ForwardBatch:
        batch = Bench.batch(self, tokens, written, position)
        batch.spec_info = self.spec_info(tokens)
        return batch

    def attach(self, batch: ForwardBatch, gap: GapBatch) -> None:
        """Copy the rows, which a draft's pass finds copied with the target's, and have it compute the gaps."""
        self.splicer.splice(gap.reads.splice.src, gap.reads.splice.dst, gap.reads.splice.shifts)
        info: Any = batch.spec_info
        # The target's gap batch gives hidden states for computed tokens only.
        info.hidden_states = None if info.hidden_states is None else info.hidden_states[gap.kept]
        attach_gap_batch(batch, gap, of_draft=True)


def check_drafts(ctx: BuildContext, drafts: Sequence[Draft]) -> None:
    """`check_live_rows` of the drafts of a server."""
    for draft in drafts:
        with draft.serving():
            bench = partial(DraftBench, spec_info=draft.spec_info)
            check_live_rows(ctx, draft.runner, draft.splicer, model="draft model", make=bench)
