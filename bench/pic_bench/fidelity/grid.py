"""The experiments GRID and SHIFT: plain text continued, its blocks spliced from donors.

Owns the prompts' making. GRID varies how many blocks there are; SHIFT moves one block by a given number of tokens,
behind text that is an exact prefix hit in every arm. Both end in the beginning of a passage whose true continuation is
gold.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pic_bench.fidelity.case import Case, Frame, place_blocks
from pic_bench.fidelity.record import Donors, Experiment
from pic_bench.fidelity.texts import TextPool
from pic_bench.fidelity.tokens import ModelText

__all__ = ["BLOCK_TOKENS", "MAX_BLOCKS", "FrameText", "filler_len", "grid_case", "make_filler", "shift_case"]

# From 80 tokens on every repeated span of random text is found whole (design notes), so each block is one run.
BLOCK_TOKENS = 80
SHIFT_BLOCK_TOKENS = 128
TAIL_TOKENS = 24
GOLD_TOKENS = 32
TARGET_HEADER = 64
DONOR_HEADER = 41

_NUMBERS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_COLOURS = "red green blue black white yellow brown gray orange purple pink gold silver copper iron tin lead"
MAX_BLOCKS = len(_NUMBERS.split())
"""The most blocks that a prompt may have."""

_TARGET_HEADER = (
    "The following passages were copied out of longer documents. Each of them stands for itself, under its own number, "
    "and the order in which they are printed says nothing about the order in which they were written. Some begin or "
    "end in the middle of a sentence. Read all of them with care, then continue the last one where it breaks off, in "
    "the same words and the same manner as its author would have done, without any remark of your own."
)
_DONOR_HEADER = (
    "Archive of the reading room: excerpts are kept in boxes by colour, one excerpt a box, with no word about where "
    "they came from or what they were once used for. Visitors may look at any box in any order they like; nothing has "
    "to be returned, and nobody will ask what was found in it or why it was opened."
)


class FrameText:
    """The pieces around blocks, as one model's ids."""

    def __init__(self, text: ModelText) -> None:
        self.target_header = text.ids(_TARGET_HEADER)[:TARGET_HEADER]
        self.donor_header = text.ids(_DONOR_HEADER)[:DONOR_HEADER]
        self.target_markers = [text.ids(f"\n\nPassage {name}") for name in _NUMBERS.split()]
        self.donor_markers = [text.ids(f" ...\n\nBox {name}") for name in _COLOURS.split()]
        self.donor_closing = text.ids(" ... End of the excerpts in this room.")

    @property
    def donor(self) -> Frame:
        """The frame of donors."""
        return Frame(header=self.donor_header, markers=self.donor_markers, closing=self.donor_closing)


def grid_case(frames: FrameText, pool: TextPool, *, num_blocks: int, number: int, seed: int) -> Case:
    """One prompt of GRID: the tail goes on where the last block ends, and gold where the tail ends."""
    rng = random.Random(f"grid-{seed}-{num_blocks}-{number}")
    last_len = BLOCK_TOKENS + TAIL_TOKENS + GOLD_TOKENS
    *others, last, foreign = pool.cut(rng, [*[BLOCK_TOKENS] * (num_blocks - 1), last_len, BLOCK_TOKENS])
    blocks = [*others, last[:BLOCK_TOKENS]]
    tail, gold = last[BLOCK_TOKENS:-GOLD_TOKENS], last[-GOLD_TOKENS:]
    target = Frame(header=frames.target_header, markers=frames.target_markers, closing=tail)
    prompt, spans, donors, shifts = place_blocks(target, frames.donor, blocks, foreign, rng)
    return Case(
        experiment=Experiment.GRID,
        name=f"grid-{num_blocks}-{number}",
        source=pool.source,
        prompt=prompt,
        gold=gold,
        blocks=spans,
        donors=donors,
        block_shifts=shifts,
    )


def shift_case(frames: FrameText, pool: TextPool, filler: Sequence[int], *, shift: int, number: int, seed: int) -> Case:
    """One prompt of SHIFT: the block stands `shift` tokens behind where its isolated donor stands.

    The block and its donor are the same for every shift of a number; what is before it is the same for every number.

    Args:
        filler: at least `filler_len(frames, shift)` tokens of any text.
    """
    rng = random.Random(f"shift-{seed}-{number}")
    last, foreign = pool.cut(rng, [SHIFT_BLOCK_TOKENS + TAIL_TOKENS + GOLD_TOKENS, BLOCK_TOKENS])
    block, rest = last[:SHIFT_BLOCK_TOKENS], last[SHIFT_BLOCK_TOKENS:]
    warm = list(filler[: filler_len(frames, shift)])
    target = Frame(header=warm, markers=frames.target_markers[:1], closing=rest[:TAIL_TOKENS])
    prompt, spans, donors, shifts = place_blocks(target, frames.donor, [block], foreign, rng)
    return Case(
        experiment=Experiment.SHIFT,
        name=f"shift-{shift}-{number}",
        source=pool.source,
        prompt=prompt,
        gold=rest[TAIL_TOKENS:],
        blocks=spans,
        donors={Donors.ISOLATED: donors[Donors.ISOLATED]},
        block_shifts={Donors.ISOLATED: shifts[Donors.ISOLATED]},
        shift=shift,
        warm_len=len(warm),
    )


def filler_len(frames: FrameText, shift: int) -> int:
    """How many tokens before the block's marker move the block by `shift`."""
    return len(frames.donor_header) + len(frames.donor_markers[0]) + shift - len(frames.target_markers[0])


def make_filler(pool: TextPool, length: int, seed: int) -> list[int]:
    """At least `length` tokens of text, the same for all prompts: passages one after the other."""
    rng = random.Random(f"filler-{seed}")
    ids: list[int] = []
    while len(ids) < length:
        (span,) = pool.cut(rng, [BLOCK_TOKENS])
        ids += span
    return ids
