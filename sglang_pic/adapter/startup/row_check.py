"""Runs the live model for the start-up check of `runtime/row_check.py`, before the first request.

Owns the token sequence and which slots it is written to; what it borrows it leaves empty, so that nothing of the check
remains. It must not judge: limits and messages are the runtime's.

NOTE: every tensor-parallel rank runs the same passes, since each pass is a collective, and hears the same verdict, so
that no rank goes on to wait for one that stopped.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_pic.adapter.probe.extend import PADDING_ROW, trial_extend
from sglang_pic.adapter.probe.ranks import agree_on_largest
from sglang_pic.adapter.probe.slots import borrow_slots, leave_empty, needed_tokens
from sglang_pic.errors import UnsupportedError
from sglang_pic.runtime.row_check import RowErrors, RowSlots, checked_shifts, judge_rows, measure_rows
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.views import PoolView

__all__ = ["check_rows"]

_NUM_TOKENS = 32


def check_rows(runner: Any, splicer: Splicer, tp_group: Any) -> RowErrors:
    """Compare moved rows with rows that the live model computes; all ranks of `tp_group` must call it together.

    Half a dozen passes over 32 tokens. The pool must hold nobody's rows yet.

    Args:
        runner: SGLang's model runner.
        splicer: moves rows of its KV pool by the rotation read from its model.
        tp_group: SGLang's tensor-parallel group, or `None` for one rank.

    Raises:
        ContractError: keys are turned by something else than the splicer's geometry says.
        UnsupportedError: the rows depend on the position otherwise, or the pool is too small to look.
    """
    view = splicer.view
    shifts = checked_shifts(splicer.geometry.max_shift, _NUM_TOKENS)
    slots = _borrowed_slots(view)
    # Any tokens do, if they differ: equal ones would have equal values whatever attention does.
    vocabulary = int(runner.model_config.vocab_size)
    tokens = (torch.arange(_NUM_TOKENS, dtype=torch.int64, device=view.device) * 7_919 + 13) % vocabulary
    row = runner.req_to_token_pool.req_to_token[PADDING_ROW]

    def compute(written: torch.Tensor, position: int) -> None:
        row[:_NUM_TOKENS] = written.to(row.dtype)
        trial_extend(runner, [_NUM_TOKENS], first_position=position, input_ids=tokens, slots=written)

    with leave_empty(view, slots, row), torch.no_grad():
        errors = measure_rows(splicer, compute, slots, shifts)
    return judge_rows(agree_on_largest(errors, tp_group), view, shifts)


def _borrowed_slots(view: PoolView) -> RowSlots:
    slots = borrow_slots(view, 3, _NUM_TOKENS)
    if not slots:
        raise UnsupportedError(
            f"a KV pool of {view.num_slots - view.page_size} tokens is too small to check rows in: "
            f"give --max-total-tokens {needed_tokens(view, 3, _NUM_TOKENS)} or more."
        )
    return RowSlots(*slots)
