"""The loss of each arm beside exact hits on the same prompts, by kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from pic_bench.paired.record import Record
from pic_bench.report.markdown import Table
from pic_bench.report.stats import MOST_KL, most_lost

MOST_LOST: Final = 0.03
"""An arm may be this much below exact hits, by the upper bound."""


class Loss(NamedTuple):
    """An arm beside exact hits on the same prompts."""

    prompts: int
    spliced_in: int
    """Prompts of which it splices something; the others cannot lose their answer."""
    computed: float
    """Share of the tokens behind exact prefixes that is computed; tokens that are computed twice count twice."""
    lost: int
    """Right by an exact hit, wrong by the arm."""
    won: int
    most_lost: float
    """Upper bound, one-sided 95 %, of the share of prompts that are lost."""
    kl: float
    """Mean over prompts, nats a token."""
    worst: float
    """The largest of any prompt's means."""
    flips: int
    exact_flips: int
    sure: int
    recovery: tuple[float, float] | None
    """The mean, and the 10th percentile."""

    @property
    def passes(self) -> bool:
        """Whether nothing says that answers suffer."""
        return self.most_lost <= MOST_LOST and self.kl <= MOST_KL and self.flips <= self.exact_flips


def losses(records: Sequence[Record]) -> dict[tuple[str, str], Loss]:
    """By kind and arm, in the order of the records; the seeds of random choice are one arm."""
    exact = {(each.kind, each.prompt): each for each in records if each.arm == "exact"}
    groups: dict[tuple[str, str], list[Record]] = {}
    for each in records:
        if (each.kind, each.prompt) in exact:
            arm = re.sub(r"^(random|tokens|drawn)-\d$", r"\1", each.arm)
            groups.setdefault((each.kind, arm), []).append(each)
    return {key: _loss(some, [exact[each.kind, each.prompt] for each in some]) for key, some in groups.items()}


def _loss(some: Sequence[Record], exact: Sequence[Record]) -> Loss:
    pairs = [*zip(some, exact, strict=True)]
    lost = sum(other.right and not each.right for each, other in pairs)
    won = sum(each.right and not other.right for each, other in pairs)
    moved = [each.recovery for each in some if each.recovery is not None]
    return Loss(
        prompts=len({each.prompt for each in some}),
        spliced_in=len({each.prompt for each in some if each.spliced}),
        computed=sum(each.tokens - each.spliced + each.again for each in some) / sum(each.tokens for each in some),
        lost=lost,
        won=won,
        most_lost=most_lost(lost, len(some)),
        kl=float(np.mean([each.kl for each in some])),
        worst=max(each.kl for each in some),
        flips=sum(each.flips for each in some),
        exact_flips=sum(other.flips for other in exact),
        sure=sum(each.sure for each in some),
        recovery=(float(np.mean(moved)), float(np.percentile(moved, 10))) if moved else None,
    )


def table_of(records: Sequence[Record]) -> Table:
    """A line for each kind and arm."""
    shares = ["prompts", "computed", "lost", "won", "at most lost, %"]
    head = ["kind", "arm", *shares, "KL", "worst", "sure flips", "recovery, 10th percentile", "passes"]
    lines = [
        [
            kind,
            arm,
            str(loss.prompts),
            f"{loss.computed:.0%}",
            str(loss.lost),
            str(loss.won),
            f"{100 * loss.most_lost:.1f}",
            f"{loss.kl:.4f}",
            f"{loss.worst:.3f}",
            f"{loss.flips} of {loss.sure}",
            "" if loss.recovery is None else "{:.2f}, {:.2f}".format(*loss.recovery),
            "yes" if loss.passes else "no",
        ]
        for (kind, arm), loss in sorted(losses(records).items(), key=lambda item: (item[0][0], item[1].kl))
    ]
    return Table(head, lines)


def summary_of(records: Sequence[Record]) -> dict[str, object]:
    """The losses as JSON, for the study's tables."""
    return {"losses": [{"kind": kind, "arm": arm, **loss._asdict()} for (kind, arm), loss in losses(records).items()]}
