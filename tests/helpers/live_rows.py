"""Rows of a live model with random weights: computed in place, and moved from elsewhere."""

from __future__ import annotations

from typing import Any, Final

import torch
from pic_kernels.numerics import relative_l2

from sglang_pic.adapter.probe.extend import PADDING_ROW, trial_batch, trial_forward
from sglang_pic.adapter.serve.forward import ForwardPath, attach_gap_batch
from sglang_pic.adapter.serve.gap_batch import build_gap_batch
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.runtime.checks.gap_rows import read_rows
from tests.helpers.builders import plan

NUM_TOKENS: Final = 230


SHIFT: Final = 1_000


class Bench:
    """The live model, and three sets of slots: rows computed at 0, rows computed at `SHIFT`, rows that are written."""

    def __init__(self, runner: Any, path: ForwardPath, slots: list[torch.Tensor]) -> None:
        self.runner, self.path, self.view = runner, path, path.splicer.view
        self.here, self.there, self.written = slots
        self.row = runner.req_to_token_pool.req_to_token[PADDING_ROW]
        draw = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(1_000, 40_000, (NUM_TOKENS,), generator=draw)
        self.full = self.prefill(self.here, 0)
        self.prefill(self.there, SHIFT)

    def prefill(self, slots: torch.Tensor, position: int) -> torch.Tensor:
        """The logits of the last token, log-probabilities in float64; the rows are written to `slots`."""
        return self._forward(self._batch(self.tokens, slots, position))

    def spliced(self, runs: tuple[tuple[int, int], ...], *, shift: int) -> torch.Tensor:
        """The same of a gap batch, whose runs are read at `shift` and whose tokens there are other ones."""
        source = self.there if shift else self.here
        given = self.tokens.clone()
        for start, end in runs:
            given[start:end] = 7
        # NaN, so that a row which neither the splice nor the pass writes shows in all that reads it.
        self.view.fill(self.written, 0xFF)
        planned = plan(0, NUM_TOKENS, *((start, end, -shift) for start, end in runs))
        pending = PendingSplice.on_device(planned, [source[start:end] for start, end in runs])
        batch = self._batch(given, self.written, 0)
        layout = build_gap_batch([pending], [0], [NUM_TOKENS], [NUM_TOKENS], [self.row], self.view.device)
        attach_gap_batch(batch, layout)
        return self._forward(batch)

    def measure(self, runs: tuple[tuple[int, int], ...], *, shift: int) -> dict[str, float]:
        """KL(full || spliced) over the whole vocabulary, and the largest relative L2 of a layer's rows."""
        spliced = self.spliced(runs, shift=shift)
        rows = zip(read_rows(self.view, self.here), read_rows(self.view, self.written), strict=True)
        return {
            "kl": float((self.full.exp() * (self.full - spliced)).sum()),
            "rows": max(relative_l2(written, full) for full, written in rows),
            "same_token": float(self.full.argmax() == spliced.argmax()),
        }

    def _batch(self, tokens: torch.Tensor, slots: torch.Tensor, position: int) -> Any:
        self.row[:NUM_TOKENS] = slots.to(self.row.dtype)
        return trial_batch(self.runner, [NUM_TOKENS], first_position=position, input_ids=tokens, slots=slots)

    def _forward(self, batch: Any) -> torch.Tensor:
        (logits,) = trial_forward(self.runner, batch).logits_output.next_token_logits
        return logits.double().log_softmax(0)
