"""Which tokens a sparse-attention indexer chooses, and how much two choices share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from sglang_pic.runtime.splice import Splicer
from tests.helpers.live_rows import NUM_TOKENS, SHIFT

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
