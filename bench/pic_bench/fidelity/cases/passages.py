"""The experiment GRID: plain text continued, its blocks spliced from donors.

Prompts differ in how many blocks they have, and end in the beginning of a passage whose true continuation is gold.
They come round robin over the numbers of blocks, so that an interrupted run has as many of each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

from pic_bench.fidelity.arms import CONTROLS, spliced_arms
from pic_bench.fidelity.cases.case import Case, Frame, FrameWords, Job, place_blocks, words
from pic_bench.fidelity.cases.text import ModelText, TextPool
from pic_bench.fidelity.config import BLOCK_TOKENS, Sizes
from pic_bench.fidelity.record import Donors, Experiment

TAIL_TOKENS = 24
GOLD_TOKENS = 32
TARGET_HEADER = 64
DONOR_HEADER = 41


class _Frames:
    """The pieces around blocks, as one model's ids."""

    def __init__(self, text: ModelText) -> None:
        said = words("passages", FrameWords)
        self.header = text.ids(said.header)[:TARGET_HEADER]
        self.markers = [text.ids(f"\n\nPassage {name}") for name in said.markers]
        self.donor = Frame(
            header=text.ids(said.donor_header)[:DONOR_HEADER],
            markers=[text.ids(f" ...\n\nBox {name}") for name in said.donor_markers],
            closing=text.ids(" ... End of the excerpts in this room."),
        )


def grid_jobs(sizes: Sizes, pool: TextPool, text: ModelText, seed: int) -> Iterator[Job]:
    """Every number of blocks, donors computed in isolation and in context."""
    frames = _Frames(text)
    arms = (*CONTROLS, *spliced_arms(sizes.seams, (Donors.ISOLATED, Donors.CONTEXT)))
    for number, num_blocks in product(range(sizes.prompts), sizes.blocks):
        rng = random.Random(f"grid-{seed}-{num_blocks}-{number}")
        passages = _passages(frames, pool, rng, num_blocks)
        case = Case(experiment=Experiment.GRID, name=f"grid-{num_blocks}-{number}", **passages)
        yield Job(case=case, arms=arms)


def _passages(frames: _Frames, pool: TextPool, rng: random.Random, num_blocks: int) -> dict[str, Any]:
    """Blocks behind a header; the tail goes on where the last one ends, gold where the tail ends."""
    last_len = BLOCK_TOKENS + TAIL_TOKENS + GOLD_TOKENS
    *others, last, foreign = pool.cut(rng, [*[BLOCK_TOKENS] * (num_blocks - 1), last_len, BLOCK_TOKENS])
    blocks = [*others, last[:BLOCK_TOKENS]]
    target = Frame(header=frames.header, markers=frames.markers, closing=last[BLOCK_TOKENS:-GOLD_TOKENS])
    placed = place_blocks(target, frames.donor, blocks, foreign, rng)
    return {"source": pool.source, "gold": last[-GOLD_TOKENS:], **placed._asdict()}
