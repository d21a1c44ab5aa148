"""The experiments GRID and SHIFT: plain text continued, its blocks spliced from donors.

GRID varies how many blocks there are. SHIFT moves one block by a given number of tokens, behind text that is an exact
prefix hit in every arm. Both end in the beginning of a passage whose true continuation is gold. Prompts come round
robin over the cells, so that an interrupted run has as many of each.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pic_bench.fidelity.arms import CONTROLS, Arm, spliced_arms
from pic_bench.fidelity.cases.case import PASSAGES, Case, Frame, Job, place_blocks
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
_GREEDY_ARMS = frozenset({"full", "retest", "exact", "naive", "seam-0", "seam-1", "seam-8"})


class FrameText:
    """The pieces around blocks, as one model's ids."""

    def __init__(self, text: ModelText) -> None:
        self.target_header = text.ids(PASSAGES.header)[:TARGET_HEADER]
        self.target_markers = [text.ids(f"\n\nPassage {name}") for name in PASSAGES.markers]
        self.donor = Frame(
            header=text.ids(PASSAGES.donor_header)[:DONOR_HEADER],
            markers=[text.ids(f" ...\n\nBox {name}") for name in PASSAGES.donor_markers],
            closing=text.ids(" ... End of the excerpts in this room."),
        )


class PassageJobs:
    """The prompts of GRID and SHIFT, which can be made without end."""

    def __init__(self, sizes: Sizes, pool: TextPool, text: ModelText, seed: int) -> None:
        self._sizes, self._pool, self._seed = sizes, pool, seed
        self._frames = FrameText(text)
        self._shifts = [shift for shift in sizes.shifts if shift + _SHIFT_ROOM <= text.context_len]
        self._context_len = text.context_len
        self._filler: list[int] = []

    def grid(self) -> Iterator[Job]:
        """Every number of blocks, donors computed in isolation and in context."""
        for number in range(self._sizes.prompts):
            yield from (self._grid_job(num_blocks, number) for num_blocks in self._sizes.blocks)

    def shift(self) -> Iterator[Job]:
        """Every shift that the model's context has room for.

        Raises:
            ConfigError: there is none.
        """
        if not self._shifts:
            raise ConfigError(
                f"no shift of {list(self._sizes.shifts)} fits into the model's context of {self._context_len} tokens."
            )
        for number in range(self._sizes.shift_prompts):
            yield from (self._shift_job(shift, number) for shift in self._shifts)

    def replacing(self, left_out: Iterable[str]) -> Iterator[Job]:
        """One more prompt, beyond those of `grid` and `shift`, for each that was left out, by their names."""
        for cell, count in Counter(name.rpartition("-")[0] for name in left_out).items():
            kind, _, place = cell.partition("-")
            for more in range(count):
                if kind == Experiment.GRID.value:
                    yield self._grid_job(int(place), self._sizes.prompts + more)
                elif kind == Experiment.SHIFT.value:
                    yield self._shift_job(int(place), self._sizes.shift_prompts + more)

    def _grid_job(self, num_blocks: int, number: int) -> Job:
        case = grid_case(self._frames, self._pool, num_blocks=num_blocks, number=number, seed=self._seed)
        arms = (*CONTROLS, *spliced_arms(self._sizes.seams, (Donors.ISOLATED, Donors.CONTEXT)))
        return self._job(case, arms, number, _GREEDY_ARMS)

    def _shift_job(self, shift: int, number: int) -> Job:
        if not self._filler:
            self._filler = make_filler(self._pool, filler_len(self._frames, max(self._shifts)), self._seed)
        case = shift_case(self._frames, self._pool, self._filler, shift=shift, number=number, seed=self._seed)
        arms = (*CONTROLS, *spliced_arms((1,), (Donors.ISOLATED,)))
        return self._job(case, arms, number, frozenset())

    def _job(self, case: Case, arms: tuple[Arm, ...], number: int, greedy_arms: frozenset[str]) -> Job:
        return Job(
            case=case,
            arms=arms,
            greedy_arms=greedy_arms if number < self._sizes.greedy_prompts else frozenset(),
            greedy_tokens=self._sizes.greedy_tokens,
            keys=number < self._sizes.key_prompts,
        )


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

    The block and its donor are the same for every shift of a number; what is before the block is the same for every
    number.

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
    return len(frames.donor.header) + len(frames.donor.markers[0]) + shift - len(frames.target_markers[0])


def make_filler(pool: TextPool, length: int, seed: int) -> list[int]:
    """At least `length` tokens of text, the same for all prompts: passages one after the other."""
    rng = random.Random(f"filler-{seed}")
    ids: list[int] = []
    while len(ids) < length:
        (span,) = pool.cut(rng, [BLOCK_TOKENS])
        ids += span
    return ids
