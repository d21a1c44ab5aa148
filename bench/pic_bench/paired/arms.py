"""The spans that an arm splices in one prompt, their donors, and the tokens that it computes again.

Policies are the product's own plans. The others:

    exact       the full prefill's own rows, in the places of those that `most` splices
    unrotated   the rows of `most`, with the rotation that they had with their donors
    whole       nothing; the answer is forced behind the session that was not compacted (`measure.py`)
    block-1     the runs of `any-order` are blocks; the one with the best attended token is computed whole in pass two
    random-N    as block-1, but blocks that seed N draws, until no fewer tokens are computed
    tokens-N    of what `most` splices, tokens that seed N draws are computed, as many as `seam-64` computes
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final, NamedTuple

from sglang_pic.core import PRESETS, Plan, ReusePolicy

POLICIES: Final = {
    "any-order": ReusePolicy(seam_tokens=32, tail_tokens=32, other_tail_tokens=0, reordered="splice"),
    "any-text": ReusePolicy(seam_tokens=64, tail_tokens=64, other_tail_tokens=0),
    **{f"seam-{seam}": ReusePolicy(seam_tokens=seam, tail_tokens=64) for seam in (32, 64, 128, 256)},
    "tail-256": ReusePolicy(seam_tokens=64, tail_tokens=256),
    "most": ReusePolicy(**PRESETS["most"]),
}
"""By name."""
LEAST_BLOCKS: Final = 3
SEEDS: Final = 5


class Block(NamedTuple):
    """Tokens `[start, end)` of the prompt, which a donor's path has from `donor_start` on."""

    start: int
    end: int
    donor: int
    donor_start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to serve a prompt."""

    name: str
    blocks: Sequence[Block]
    """Spliced in pass one."""
    rotates: bool = True
    is_exact: bool = False
    """The rows are the full prefill's own."""
    whole: Sequence[Block] = ()
    """The one with the best attended token is computed whole in pass two; without any there is none."""
    drawn: random.Random | None = None
    """Draws the blocks of pass two instead."""


def blocks_of(plan: Plan, donors: Sequence[object], *, whole: bool = False) -> list[Block]:
    """The runs of a plan; `whole` with their seams."""
    blocks = []
    for run in plan.runs:
        seam = run.seam_len if whole else 0
        blocks.append(Block(run.target_start - seam, run.target_end, donors.index(run.donor), run.donor_start - seam))
    return blocks


def policy_arms(plans: Mapping[str, Plan], donors: Sequence[object], number: int) -> list[Arm]:
    """The plans of all policies, and the controls; `number` is the prompt's."""
    most = blocks_of(plans["most"], donors)
    arms = [Arm(name="exact", blocks=most, is_exact=True), Arm(name="unrotated", blocks=most, rotates=False)]
    arms += [Arm(name=name, blocks=blocks_of(plan, donors)) for name, plan in plans.items()]
    seed, num = number % SEEDS, plans["most"].num_spliced - plans["seam-64"].num_spliced
    places = [at for block in most for at in range(block.start, block.end)]
    drawn = {*random.Random(f"tokens-{seed}-{number}").sample(places, max(0, num))}
    return [*arms, Arm(name=f"tokens-{seed}", blocks=[part for block in most for part in _without(block, drawn)])]


def attended_arms(plan: Plan, donors: Sequence[object], number: int) -> list[Arm]:
    """The second pass, and its control; none where there is little to choose."""
    whole, spliced = blocks_of(plan, donors, whole=True), blocks_of(plan, donors)
    if len(spliced) < LEAST_BLOCKS:
        return []
    seed = number % SEEDS
    drawn = Arm(name=f"random-{seed}", blocks=spliced, whole=whole, drawn=random.Random(f"{seed}-{number}"))
    return [Arm(name="block-1", blocks=spliced, whole=whole), drawn]


def _without(block: Block, drawn: Set[int]) -> list[Block]:
    """The parts of a block between some tokens."""
    parts, start = [], block.start
    for at in (*sorted(each for each in drawn if block.start <= each < block.end), block.end):
        if start < at:
            parts.append(Block(start, at, block.donor, block.donor_start + start - block.start))
        start = at + 1
    return parts
