"""Rows of a live model with random weights: computed in place, and moved from elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from pic_kernels.numerics import relative_l2

from sglang_pic.adapter.probe.extend import PADDING_ROW, trial_batch, trial_forward
from sglang_pic.adapter.serve.forward import ForwardPath, attach_gap_batch
from sglang_pic.adapter.serve.gap_batch import build_gap_batch
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.runtime.checks.gap_rows import read_rows
from sglang_pic.runtime.splice import Splicer
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


RUNS: Final = ((20, 90), (100, 150), (155, 200))
COMPUTED: Final = [at for at in range(NUM_TOKENS) if not any(start <= at < end for start, end in RUNS)]


class Chosen:
    """Stands where SGLang records what its indexers choose: a set of tokens per layer and query."""

    def __init__(self) -> None:
        self.layers: dict[int, list[set[int]]] = {}

    def capture(self, layer_id: int, topk_indices: torch.Tensor) -> None:
        self.layers[layer_id] = [set(row) - {-1} for row in topk_indices.tolist()]

    def on_forward_end(self, *_: object, **__: object) -> None:
        """What SGLang calls when it has all of them."""


@contextmanager
def recorded() -> Iterator[Chosen]:
    from sglang.srt.state_capturer.indexer_topk import set_global_indexer_capturer

    chosen = Chosen()
    set_global_indexer_capturer(chosen)
    yield chosen
    set_global_indexer_capturer(None)


def overlaps(chosen: Chosen, full: Chosen) -> list[float]:
    """By layer, the share of the tokens that `full` chose: mean over the computed queries that could not choose all."""
    shares = []
    for layer, queries in full.layers.items():
        given = chosen.layers[layer]
        counted = [at for at in COMPUTED if at >= len(queries[at])]
        pairs = [(given[at if len(given) == NUM_TOKENS else COMPUTED.index(at)], queries[at]) for at in counted]
        shares.append(sum(len(got & want) / len(want) for got, want in pairs) / max(1, len(pairs)))
    return shares


def ways_of(splicer: Splicer) -> list[tuple[str, int, Splicer]]:
    """What is measured, by name: a shift, and what moves the rows; as a control, index keys are moved as they are."""

    def still(form: Any) -> Any:
        rope = dataclasses.replace(form.rope, inv_freq=torch.zeros_like(form.rope.inv_freq))
        return dataclasses.replace(form, rope=rope)

    index = tuple(form and still(form) for form in splicer.geometry.index)
    unturned = Splicer(splicer.view, dataclasses.replace(splicer.geometry, index=index))
    return [("here", 0, splicer), ("moved", SHIFT, splicer), ("unturned", SHIFT, unturned)]
