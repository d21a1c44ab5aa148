"""The experiments GRID and SHIFT: plain text continued, its blocks spliced from donors.

GRID varies how many blocks there are. SHIFT moves one block by a given number of tokens, behind text that is an exact
prefix hit in every arm. Both end in the beginning of a passage whose true continuation is gold. Prompts come round
robin over the cells, so that an interrupted run has as many of each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

from pic_bench.fidelity.arms import CONTROLS, spliced_arms
from pic_bench.fidelity.cases.case import Case, Frame, FrameWords, Ids, Job, place_blocks, words
from pic_bench.fidelity.cases.text import ModelText, TextPool
from pic_bench.fidelity.config import BLOCK_TOKENS, Sizes
from pic_bench.fidelity.record import Donors, Experiment
from sglang_pic.errors import ConfigError

SHIFT_BLOCK_TOKENS = 128
TAIL_TOKENS = 24
GOLD_TOKENS = 32
TARGET_HEADER = 64
DONOR_HEADER = 41
_SHIFT_ROOM = 512  # header, block, tail, gold and the generated token


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
        passages = _passages(frames, pool, rng, [BLOCK_TOKENS] * num_blocks, frames.header)
        case = Case(experiment=Experiment.GRID, name=f"grid-{num_blocks}-{number}", **passages)
        yield Job(case=case, arms=arms, keys=number < sizes.key_prompts)


def shift_jobs(sizes: Sizes, pool: TextPool, text: ModelText, seed: int) -> Iterator[Job]:
    """Every shift that the model's context has room for: so far behind its isolated donor stands the block.

    The block and its donor are the same for every shift of a number; what is before the block is the same for every
    number.

    Raises:
        ConfigError: there is room for none.
    """
    shifts = [shift for shift in sizes.shifts if shift + _SHIFT_ROOM <= text.context_len]
    if not shifts:
        raise ConfigError(
            f"no shift of {list(sizes.shifts)} fits into the model's context of {text.context_len} tokens."
        )
    frames = _Frames(text)
    unmoved = len(frames.donor.header) + len(frames.donor.markers[0]) - len(frames.markers[0])
    filler = _filler(pool, unmoved + max(shifts), seed)
    arms = (*CONTROLS, *spliced_arms((1,), (Donors.ISOLATED,)))
    for number, shift in product(range(sizes.shift_prompts), shifts):
        rng, warm = random.Random(f"shift-{seed}-{number}"), filler[: unmoved + shift]
        passages = _passages(frames, pool, rng, [SHIFT_BLOCK_TOKENS], warm)
        name = f"shift-{shift}-{number}"
        case = Case(experiment=Experiment.SHIFT, name=name, shift=shift, warm_len=len(warm), **passages)
        yield Job(case=case, arms=arms, keys=number < sizes.key_prompts)


def _passages(frames: _Frames, pool: TextPool, rng: random.Random, lengths: list[int], header: Ids) -> dict[str, Any]:
    """Blocks of these lengths behind a header; the tail goes on where the last one ends, gold where the tail ends."""
    last_len = lengths[-1] + TAIL_TOKENS + GOLD_TOKENS
    *others, last, foreign = pool.cut(rng, [*lengths[:-1], last_len, BLOCK_TOKENS])
    blocks = [*others, last[: lengths[-1]]]
    target = Frame(header=header, markers=frames.markers, closing=last[lengths[-1] : -GOLD_TOKENS])
    placed = place_blocks(target, frames.donor, blocks, foreign, rng)
    return {"source": pool.source, "gold": last[-GOLD_TOKENS:], **placed._asdict()}


def _filler(pool: TextPool, length: int, seed: int) -> Ids:
    """At least `length` tokens of text, the same for all prompts: passages one after the other."""
    rng = random.Random(f"filler-{seed}")
    ids: Ids = []
    while len(ids) < length:
        (span,) = pool.cut(rng, [BLOCK_TOKENS])
        ids += span
    return ids
