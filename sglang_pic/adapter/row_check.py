"""Runs the live model for the start-up check of `runtime/row_check.py`, before the first request.

Owns the token sequence, the borrowed slots and page-table row, and the agreement of the ranks; it puts back what it
found, so that nothing of the check remains. It must not judge: limits and messages are the runtime's.

NOTE: every tensor-parallel rank runs the same passes, since each pass is a collective, and hears the same verdict, so
that no rank goes on to wait for one that stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_pic.adapter.trial_extend import PADDING_ROW, trial_extend
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

    with _put_back(view, slots, row), torch.no_grad():
        errors = measure_rows(splicer, compute, slots, shifts)
    return judge_rows(_agree(errors, tp_group), view, shifts)


def _borrowed_slots(view: PoolView) -> RowSlots:
    """Slots behind the padding page, each set on pages of its own, in order, as backends with pages need them."""
    stride = -(-_NUM_TOKENS // view.page_size) * view.page_size
    if view.page_size + 3 * stride > view.num_slots:
        raise UnsupportedError(
            f"a KV pool of {view.num_slots - view.page_size} tokens is too small to check rows in: "
            f"give --max-total-tokens {3 * stride} or more."
        )
    index = torch.arange(_NUM_TOKENS, dtype=torch.int64, device=view.device)
    return RowSlots(*(index + view.page_size + number * stride for number in range(3)))


@contextmanager
def _put_back(view: PoolView, slots: RowSlots, row: torch.Tensor) -> Iterator[None]:
    borrowed = torch.cat(slots)
    buffers = [buffer.view(torch.uint8) for buffer in (*view.keys, *view.values)]
    rows, table = [buffer[borrowed] for buffer in buffers], row[:_NUM_TOKENS].clone()
    try:
        yield
    finally:
        row[:_NUM_TOKENS] = table
        for buffer, old in zip(buffers, rows, strict=True):
            buffer[borrowed] = old


def _agree(errors: torch.Tensor, tp_group: Any) -> torch.Tensor:
    if tp_group is not None and tp_group.world_size > 1:
        torch.distributed.all_reduce(errors, op=torch.distributed.ReduceOp.MAX, group=tp_group.cpu_group)
    return errors
