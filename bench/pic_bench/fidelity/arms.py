"""Owns what an arm is: how one prompt is served, and which arms every experiment has.

It must not know prompts, servers or metrics.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pic_bench.fidelity.record import Donors

__all__ = ["CONTROLS", "EXACT", "FULL", "NAIVE", "RETEST", "SHIPPED", "Arm", "seam_arm", "spliced_arms"]


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve a prompt; a control has no donors and takes nothing from the chunk index."""

    name: str
    donors: Donors = Donors.NONE
    rotate: bool = True
    overrides: dict[str, int] = {}
    """Settings of the reuse policy; the server's hold for the others."""

    @property
    def seam_tokens(self) -> int | None:
        """The arm's own seam, if it has one."""
        return self.overrides.get("seam_tokens")

    def overriding(self, name: str, **overrides: int) -> Arm:
        """The same arm under another name with further settings of its own."""
        return msgspec.structs.replace(self, name=name, overrides={**self.overrides, **overrides})

    @property
    def is_control(self) -> bool:
        """Whether nothing is spliced."""
        return self.donors is Donors.NONE

    @property
    def label(self) -> str:
        """Unique among the arms of a prompt; fit for a file's name."""
        return f"{self.name}-{self.donors.value}"


FULL = Arm(name="full")
RETEST = Arm(name="retest")
EXACT = Arm(name="exact")
CONTROLS = (FULL, RETEST, EXACT)
"""In this order: the exact hit is a hit on the full prefill's rows."""
SHIPPED = Arm(name="default")
"""What the server splices of its own accord: which blocks, and how much of them, is for it to say."""
_EVERY_BLOCK = Arm(name="every-block", overrides={"min_spliced_tokens": 8, "tail_tokens": 0})
"""Every block is spliced, wherever it lies, but for its seam."""
NAIVE = msgspec.structs.replace(_EVERY_BLOCK.overriding("naive", seam_tokens=1), rotate=False)


def seam_arm(seam_tokens: int) -> Arm:
    """Every block is spliced, wherever it lies, but for this many tokens."""
    return _EVERY_BLOCK.overriding(f"seam-{seam_tokens}", seam_tokens=seam_tokens)


def spliced_arms(seams: Sequence[int], donors: Sequence[Donors]) -> list[Arm]:
    """An arm for every seam and the naive one, once for each kind of donor."""
    kinds = [*map(seam_arm, seams), NAIVE]
    return [msgspec.structs.replace(arm, donors=kind) for kind in donors for arm in kinds]
