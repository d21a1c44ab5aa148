"""The passes of a draft model, which follow its target's pass over the same batch.

A draft's rows are copied with the target's. Its pass is narrowed by the same layout, because the target's hidden states
exist for the gaps' tokens only. If the batch has media, SGLang hands the embeddings of its tokens on to the draft,
shifted by a token in the whole batch: between the passes they are as long as that, and a draft embeds the token after a
gap itself, as that after a prompt. With multi-layer EAGLE, whose heads get no embeddings, one pass of each head
follows, over copies of one batch that share its `spec_info`: the layout is attached there.

A draft's pass that raises has hidden states for the gaps only: its rows of the runs cost accepted tokens, no answer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from sglang_pic.adapter.serve.gap_batch import GapBatch, Pass
from sglang_pic.adapter.sglang.seams import ForwardBatch, ModelRunner, RunnerOutput
from sglang_pic.runtime.splice import Splicer

_ATTRIBUTE = "pic_pass"


class DraftPasses:
    """The passes of the draft model of one scheduler rank, or of its heads; none without splicers.

    Args:
        splicers: copy the rows that the draft model, or each of its heads, has in the same slots.
    """

    def __init__(self, splicers: Sequence[Splicer] = ()) -> None:
        self.splicers = splicers
        self._next: Pass | None = None

    def take(self, forward_batch: ForwardBatch, runner: ModelRunner) -> bool:
        """Whether a batch is a draft's; the pass that follows the target's is attached to it then."""
        planned, self._next = self._next, None
        if not self._are_run_by(runner):
            return False
        if planned is not None:
            setattr(forward_batch.spec_info, _ATTRIBUTE, planned)
        return True

    def pass_of(self, forward_batch: ForwardBatch, runner: ModelRunner) -> Pass | None:
        """The pass that is attached to a batch; None if it is not a draft's, or is computed whole."""
        return getattr(forward_batch.spec_info, _ATTRIBUTE, None) if self._are_run_by(runner) else None

    def follow(self, planned: Pass, gap: GapBatch, forward_batch: ForwardBatch, output: RunnerOutput) -> None:
        """Have the draft's pass follow one that computed the gaps of the target's batch, by the same layout."""
        if not self.splicers or not planned.spliced or planned.of_draft:
            return
        logits = output.logits_output
        if logits.mm_input_embeds is not None:
            logits.mm_input_embeds = _widen(logits.mm_input_embeds, gap, len(forward_batch.input_ids))
        self._next = planned._replace(observers=(), of_draft=True)

    def _are_run_by(self, runner: ModelRunner) -> bool:
        return bool(self.splicers) and runner.is_draft_worker


def narrowed_fields(gap: GapBatch, forward_batch: ForwardBatch, runner: ModelRunner) -> dict[str, Any]:
    """The fields of a draft's batch that change with its gaps beside those of every batch."""
    fields: dict[str, Any] = {}
    if forward_batch.mm_input_embeds is not None:
        # The draft embeds the last token of each gap itself: id 0 for one of an image. At the end of a prefill chunk
        # SGLang takes the sampled token for one of an image.
        input_ids, ends = forward_batch.input_ids[gap.kept], gap.wide.places + gap.wide.lens - 1
        last = input_ids[ends]
        fields["input_ids"] = input_ids.index_copy(0, ends, last.where(last < runner.model_config.vocab_size, 0))
    if getattr(forward_batch.spec_info, "dsa_seed_topk_select", None) is not None:
        # A draft passes on its indexer's choice for each request's last token, found by that token's place.
        fields["spec_info"] = copy.copy(forward_batch.spec_info)
        fields["spec_info"].dsa_seed_topk_select = gap.wide.computed_lens.cumsum(0) - 1
    return fields


def widen_batch(gap: GapBatch, forward_batch: ForwardBatch) -> None:
    """Have a draft's whole batch computed after a fault: its hidden states get zeros for spliced tokens."""
    spec: Any = forward_batch.spec_info
    if spec.hidden_states is not None:
        spec.hidden_states = _widen(spec.hidden_states, gap, len(forward_batch.input_ids))
    # The following heads get states of the whole batch, too.
    delattr(spec, _ATTRIBUTE)


def _widen(rows: torch.Tensor, gap: GapBatch, num_tokens: int) -> torch.Tensor:
    """Expand rows of the computed tokens, `[num_computed, width]` and padding, to those of a whole batch."""
    whole = rows.new_zeros(num_tokens, rows.shape[-1])
    return whole.index_copy_(0, gap.kept, rows[: len(gap.kept)])
