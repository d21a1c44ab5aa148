"""Runs the live model for the start-up checks of rows (`runtime.checks`), before the first request.

It compares moved rows with computed ones, then a gap batch, executed as for requests, with a full prefill. No setting
switches this off.

NOTE: every tensor-parallel rank runs the same passes, because each pass is a collective, and gets the same verdict.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from sglang_pic.adapter.probe.borrowed_slots import borrow_slots
from sglang_pic.adapter.probe.extend import PADDING_ROW, different_tokens, trial_batch, trial_logits
from sglang_pic.adapter.probe.ranks import agree_on_largest
from sglang_pic.adapter.serve.forward import attach_gap_batch
from sglang_pic.adapter.serve.gap_batch import GapBatch, build_gap_batch
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.adapter.sglang.seams import BuildContext, ForwardBatch, ModelRunner, TpGroup
from sglang_pic.adapter.support import max_sequences
from sglang_pic.core import Path, Plan, Run
from sglang_pic.runtime.checks.gap_rows import GapErrors, GapRows, judge_gaps, measure_gaps, read_rows
from sglang_pic.runtime.checks.moved_rows import RowErrors, RowSlots, checked_shifts, judge_rows, measure_rows
from sglang_pic.runtime.splice import Splicer

logger = logging.getLogger(__name__)

_NUM_TOKENS: Final = 32
# [0, 6) gap | [6, 14) run | [14, 17) gap | [17, 27) run | [27, 32) gap
_RUNS: Final = ((6, 14), (17, 27))


def check_rows(
    runner: ModelRunner,
    splicer: Splicer,
    max_sequences: int,
    tp_group: TpGroup | None,
    *,
    make: Callable[..., Bench] | None = None,
) -> tuple[RowErrors, GapErrors]:
    """Compare moved rows with rows that the live model computes; all ranks of `tp_group` must call this together.

    Less than a dozen passes over 32 tokens. The pool must have no rows yet, and is left empty.

    Args:
        runner: SGLang's model runner, the forward hooks applied.
        splicer: the forward hooks' splicer. Layers whose keys turn out not to depend on positions are no longer
            rotated.
        max_sequences: most sequences of one batch, 2 or more.
        tp_group: SGLang's tensor-parallel group, or `None` for one rank.
        make: makes the `Bench`, if the model's passes are not those of `Bench`.

    Raises:
        ContractError: keys are not rotated as read from the model, or the forward pass does not execute splices.
        UnsupportedError: rows depend on positions in another way too, the attention backend does not read spliced rows,
            or the pool is too small.
    """
    view = splicer.view
    steps, longest = splicer.geometry.steps, splicer.geometry.max_shift
    # Rows are computed at position 0, too, and can be moved within the first step only.
    most = longest if steps is None else min(longest, steps.length - steps.offset)
    shifts = checked_shifts(most, _NUM_TOKENS)
    tokens, wrong = (different_tokens(runner, _NUM_TOKENS, view.device, first=first) for first in (13, 14))
    row = runner.req_to_token_pool.req_to_token[PADDING_ROW]
    with borrow_slots(view, 3, _NUM_TOKENS, row) as slots, torch.no_grad():
        bench = (make or Bench)(runner, splicer, row, RowSlots(*slots), tokens)
        errors = measure_rows(splicer, bench.compute, bench.slots, shifts)
        moved = judge_rows(agree_on_largest(errors, tp_group), view, shifts)
        splicer.hold(moved.unrotated_layers)
        shares = bench.measure_gap_batch(wrong, _RUNS[: max_sequences - 1], max(shifts))
        gaps = judge_gaps(agree_on_largest(shares, tp_group), view, runner.prefill_attention_backend_str)
    return moved, gaps


def check_live_rows(
    ctx: BuildContext,
    runner: ModelRunner,
    splicer: Splicer,
    model: str = "model",
    make: Callable[..., Bench] | None = None,
) -> None:
    """`check_rows` of a model; logs the differences, naming `model`."""
    view, started_at = splicer.view, time.perf_counter()
    rows, gaps = check_rows(runner, splicer, max_sequences(runner), ctx.tp_group, make=make)
    logger.info(
        "sglang_pic: %s, %s pool, %d layers: moved rows differ from computed ones by a relative L2 of %.1e (keys "
        "of the first layer), %.1e (keys of any layer; unmoved %.1e), %.1e (values and latent rows); rows of a gap "
        "batch by %.1e (first layer), and rows after a splice by %.3f of what a wrong splice changes; checked in %.0f "
        "ms",
        model,
        view.kind.value,
        view.num_layers,
        rows.first_keys,
        rows.keys,
        rows.unmoved_keys,
        rows.rest,
        gaps.first,
        gaps.unread,
        1e3 * (time.perf_counter() - started_at),
    )
    if view.index_dtype is not None:
        logger.info("sglang_pic: moved index keys differ from computed ones by a relative L2 of %.1e", rows.index_keys)
    if rows.unrotated_layers:
        logger.info(
            "sglang_pic: %d layers use no positions; their keys are moved as they are", len(rows.unrotated_layers)
        )
    if rows.noisy_layers:
        # Only the operator's own prompts can say whether that matters: the self-test measures answers.
        logger.warning(
            "sglang_pic: rows of %d layers, from layer %d on, differ more between positions than those of the tested "
            "models: rounding grows with depth and changes the choice of experts. Splices differ as much.",
            len(rows.noisy_layers),
            rows.noisy_layers[0],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """The live model, the page-table row and slots to write, and the tokens to compute."""

    runner: ModelRunner
    splicer: Splicer
    row: torch.Tensor
    slots: RowSlots
    tokens: torch.Tensor

    def compute(self, written: torch.Tensor, position: int) -> None:
        """Write the rows of the tokens, the first one at `position`."""
        self._logits(self.batch(self.tokens, written, position))

    def _logits(self, batch: ForwardBatch) -> torch.Tensor:
        """`[1, vocab_size]` float64."""
        return trial_logits(self.runner, batch).to(torch.float64)

    def measure_gap_batch(self, wrong: torch.Tensor, spans: tuple[tuple[int, int], ...], position: int) -> torch.Tensor:
        """`measure_gaps` with `spans` spliced from the same tokens at `position`; the pass gets `wrong` ones there."""
        view, (here, there, written) = self.splicer.view, self.slots
        given = self.tokens.clone()
        for start, end in spans:
            given[start:end] = wrong[start:end]
        full = self._logits(self.batch(self.tokens, here, 0))
        self.compute(there, position)
        misled_logits = self._logits(self.batch(given, written, 0))
        misled = read_rows(view, written)
        # NaN in every dtype: a row that neither splice nor pass writes shows in all later rows.
        view.fill(written, 0xFF)
        donor = Path("row check", [np.zeros(position + _NUM_TOKENS, np.int32)])
        runs = tuple(
            Run(target_start=start, target_end=end, donor_start=position + start, donor=donor, seam_len=0)
            for start, end in spans
        )
        pending = PendingSplice.on_device(
            Plan(prefix_len=0, end=_NUM_TOKENS, runs=runs), [there[a:b] for a, b in spans]
        )
        batch = self.batch(given, written, 0)
        gap = build_gap_batch([pending], [0], [_NUM_TOKENS], [_NUM_TOKENS], [self.row], view.device)
        self.attach(batch, gap)
        answers = GapRows(full, self._logits(batch), misled_logits)
        rows = zip(read_rows(view, here), read_rows(view, written), misled, strict=True)
        behind = [at for at in range(spans[0][1], _NUM_TOKENS) if not any(start <= at < end for start, end in spans)]
        return measure_gaps([GapRows(*layer) for layer in rows], behind, answers)

    def batch(self, tokens: torch.Tensor, written: torch.Tensor, position: int) -> ForwardBatch:
        """A batch of one sequence that writes the rows of `tokens`, the first one at `position`."""
        self.row[:_NUM_TOKENS] = written.to(self.row.dtype)
        return trial_batch(self.runner, [_NUM_TOKENS], first_position=position, input_ids=tokens, slots=written)

    def attach(self, batch: ForwardBatch, gap: GapBatch) -> None:
        """Have the next pass over `batch` copy rows and compute the gaps."""
        attach_gap_batch(batch, gap)
