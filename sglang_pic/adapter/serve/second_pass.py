"""The second pass of a batch in which requests splice text in another order (`core.reordered: attend`).

    pass one   [gap][seam | run A   ][seam | run B   ][seam | run C   ][last gap)
    choice     the attention of the last gap's tokens to each run, in a few layers
    pass two                         [run B with its seam ]            [last gap)

Splicing all documents of a reordered list loses answers that depend on what stood between them, and mostly in the one
document that the question asks for (bench/results/study/context.md). Pass two writes its rows over the spliced ones,
in the request's own slots, and its logits are the answer's. The host waits once for the scores, which all ranks add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from sglang_pic.adapter.metrics import Metric, MetricKind, Series
from sglang_pic.adapter.probe.ranks import sum_over_ranks
from sglang_pic.adapter.serve.gap_batch import Asking
from sglang_pic.adapter.sglang.hooks import hook
from sglang_pic.adapter.sglang.seams import Req, TpGroup
from sglang_pic.runtime.attended import best_attended
from sglang_pic.runtime.views import PoolView

MOST_ASKING: Final = 64
"""The last tokens of a prompt whose attention counts."""
AGAIN: Final = Metric(
    "sglang:pic_attended_tokens_total",
    MetricKind.COUNTER,
    "Tokens counted as spliced that a second pass computed, because the end of the prompt attends to them most.",
)
METRICS: Final = (AGAIN,)


class SecondPass:
    """Chooses what the second passes of one scheduler rank compute.

    Args:
        view: the KV pool, of keys by head.
        ranks: that have a part of the heads each; None for one rank.
        layers: ids of those whose attention chooses; all until start-up has found them.
        series: exports `METRICS`.
    """

    def __init__(self, view: PoolView, ranks: TpGroup | None, layers: Sequence[int], series: Series) -> None:
        self._view, self._ranks, self._series = view, ranks, series
        self.layers = layers
        self._asking: Sequence[Asking] = ()
        self._scores: dict[int, list[torch.Tensor]] = {}

    def install(self) -> None:
        """Register the hook; SGLang applies it when its registry is applied."""
        hook(__name__, "RadixAttention.forward", self._look)

    @contextmanager
    def watching(self, asking: Sequence[Asking]) -> Iterator[None]:
        """Look at the attention of a pass in which these requests ask."""
        self._asking, self._scores = asking, {}
        try:
            yield
        finally:
            self._asking = ()

    def scores(self) -> torch.Tensor:
        """Of the pass that was watched, on the CPU: `[num_layers, spans of all requests that ask]`."""
        layers = [torch.cat(self._scores[layer]) for layer in self.layers]
        return sum_over_ranks(torch.stack(layers).cpu(), self._ranks)

    def choose(self, asking: Sequence[Asking]) -> list[int]:
        """For each request that asks, the number of the span with the best attended token."""
        by_request = self.scores().sum(0).split([len(asks.spans) for asks in asking])
        return [int(each.argmax()) for each in by_request]

    def count(self, asking: Sequence[Asking], chosen: Sequence[int], spliced: Sequence[Req]) -> None:
        """Count what pass two computed as computed; `spliced` are the requests of the batch with a splice."""
        for asks, number in zip(asking, chosen, strict=True):
            req = spliced[asks.number]
            num_again = req.pic.compute_again(asks.lens[number])
            req.cached_tokens -= num_again
            self._series.add(AGAIN, num_again)

    def _look(self, _: object, layer: Any, q: torch.Tensor, *_args: object, **_kwargs: object) -> None:
        if not self._asking or layer.layer_id not in self.layers:
            return
        keys = self._view.keys[layer.layer_id - self._view.start_layer]
        found = self._scores[layer.layer_id] = []
        for asks in self._asking:
            num = min(MOST_ASKING, asks.last[1] - asks.last[0])
            queries = q[asks.at - num : asks.at].reshape(num, -1, layer.qk_head_dim)
            found.append(best_attended(queries, keys[asks.slots.long()], asks.spans, scaling=layer.scaling))
