"""The experiment GRID: plain text continued, its blocks spliced from donors.

Prompts differ in how many blocks they have, and end in the beginning of a passage whose true continuation is gold.
They come round robin over the numbers of blocks, so that an interrupted run has as many of each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from pic_bench.fidelity.arms import CONTROLS, spliced_arms
from pic_bench.fidelity.cases.case import Case, Frame, FrameWords, Job, place_blocks, words
from pic_bench.fidelity.cases.text import ModelText, TextPool
from pic_bench.fidelity.config import BLOCK_TOKENS, Sizes
from pic_bench.fidelity.record import Donors, Experiment

TAIL_TOKENS = 24
GOLD_TOKENS = 32
TARGET_HEADER = 64
DONOR_HEADER = 41


def grid_jobs(sizes: Sizes, pool: TextPool, text: ModelText, seed: int) -> Iterator[Job]:
    """Every number of blocks, donors computed in isolation and in context."""
    said = words("passages", FrameWords)
    header, markers = text.ids(said.header)[:TARGET_HEADER], [text.ids(f"\n\nPassage {name}") for name in said.markers]
    donor = Frame(
        header=text.ids(said.donor_header)[:DONOR_HEADER],
        markers=[text.ids(f" ...\n\nBox {name}") for name in said.donor_markers],
        closing=text.ids(" ... End of the excerpts in this room."),
    )
    arms = (*CONTROLS, *spliced_arms(sizes.seams, (Donors.ISOLATED, Donors.CONTEXT)))
    # The tail goes on where the last block ends, gold where the tail ends.
    last_len = BLOCK_TOKENS + TAIL_TOKENS + GOLD_TOKENS
    for number, num_blocks in product(range(sizes.prompts), sizes.blocks):
        name = f"grid-{num_blocks}-{number}"
        rng = random.Random(f"grid-{seed}-{num_blocks}-{number}")
        *others, last, foreign = pool.cut(rng, [*[BLOCK_TOKENS] * (num_blocks - 1), last_len, BLOCK_TOKENS])
        target = Frame(header=header, markers=markers, closing=last[BLOCK_TOKENS:-GOLD_TOKENS])
        placed = place_blocks(target, donor, [*others, last[:BLOCK_TOKENS]], foreign, rng)._asdict()
        gold = last[-GOLD_TOKENS:]
        yield Job(case=Case(experiment=Experiment.GRID, name=name, source=pool.source, gold=gold, **placed), arms=arms)
