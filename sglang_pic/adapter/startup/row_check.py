"""Runs the live model for the start-up check of moved rows (`runtime.checks.moved_rows`), before the first request.

NOTE: every tensor-parallel rank runs the same passes, because each pass is a collective, and gets the same verdict, so
that no rank waits for one that stopped.
"""

from __future__ import annotations

import torch

from sglang_pic.adapter.probe.extend import PADDING_ROW, trial_batch, trial_forward
from sglang_pic.adapter.probe.ranks import agree_on_largest
from sglang_pic.adapter.probe.slots import borrow_slots
from sglang_pic.adapter.seams import ModelRunner, TpGroup
from sglang_pic.runtime.checks.moved_rows import RowErrors, RowSlots, checked_shifts, judge_rows, measure_rows
from sglang_pic.runtime.splice import Splicer

_NUM_TOKENS = 32


def check_rows(runner: ModelRunner, splicer: Splicer, tp_group: TpGroup | None) -> RowErrors:
    """Compare moved rows with rows that the live model computes; all ranks of `tp_group` must call this together.

    Half a dozen passes over 32 tokens. The pool must hold nobody's rows yet, and is left empty.

    Args:
        runner: SGLang's model runner.
        splicer: moves rows of the runner's KV pool by the rotation read from its model.
        tp_group: SGLang's tensor-parallel group, or `None` for one rank.

    Raises:
        ContractError: the keys' rotation is not the one that was read from the model.
        UnsupportedError: the rows depend on the position in another way, too, or the pool is too small for the check.
    """
    view = splicer.view
    shifts = checked_shifts(splicer.geometry.max_shift, _NUM_TOKENS)
    # Any tokens do, as long as they differ: equal ones would have equal values whatever attention does.
    vocabulary = int(runner.model_config.vocab_size)
    tokens = (torch.arange(_NUM_TOKENS, dtype=torch.int64, device=view.device) * 7_919 + 13) % vocabulary
    row = runner.req_to_token_pool.req_to_token[PADDING_ROW]

    def compute(written: torch.Tensor, position: int) -> None:
        row[:_NUM_TOKENS] = written.to(row.dtype)
        batch = trial_batch(runner, [_NUM_TOKENS], first_position=position, input_ids=tokens, slots=written)
        trial_forward(runner, batch)

    with borrow_slots(view, 3, _NUM_TOKENS, row) as slots, torch.no_grad():
        errors = measure_rows(splicer, compute, RowSlots(*slots), shifts)
    return judge_rows(agree_on_largest(errors, tp_group), view, shifts)
