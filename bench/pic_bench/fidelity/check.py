"""The check that CI makes of a run: keys that are not rotated must do harm, or the measurement could not see any.

Owns the choice of arms and the bound. It must not know reports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pic_bench.fidelity.record import Donors, Experiment, Probe
from pic_bench.report.stats import bootstrap

__all__ = ["Checked", "check_naive"]

ROTATED = "seam-1"
NAIVE = "naive"
_MIN_SHIFT = 16
"""A key turned by fewer positions is hardly turned."""


_Key = tuple[str, str, str, Donors]
"""Source, text, prompt and donors of a record."""


class Checked(NamedTuple):
    """One number format: by how much the naive arm's KL is above the rotated one's, with its 95 % interval."""

    dtype: str
    num_texts: int
    difference: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """Whether the naive arm is worse, beyond chance."""
        return self.low > 0

    def __str__(self) -> str:
        word = "holds" if self.holds else "FAILS"
        return (
            f"check {word}: {self.dtype}: mean KL without rotation less with it {self.difference:.4g} "
            f"[{self.low:.4g}, {self.high:.4g}] over {self.num_texts} texts"
        )


def check_naive(probes: Sequence[Probe]) -> list[Checked]:
    """The check for every number format that has both arms on GRID or SHIFT; a text counts once.

    The KL is the mean over the gold continuation: less noisy than that of one token.
    """
    found: dict[str, dict[_Key, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for probe in probes:
        moved_far = probe.experiment is Experiment.GRID or (
            probe.experiment is Experiment.SHIFT and (probe.shift or 0) >= _MIN_SHIFT
        )
        if moved_far and probe.arm in (ROTATED, NAIVE) and probe.forced_kl is not None:
            found[probe.dtype][probe.source, probe.unit, probe.prompt, probe.donors][probe.arm] = probe.forced_kl
    return [_check(dtype, arms) for dtype, arms in found.items()]


def _check(dtype: str, arms: Mapping[_Key, Mapping[str, float]]) -> Checked:
    by_text: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (source, unit, _, _), values in arms.items():
        if len(values) == 2:
            by_text[source, unit].append(values[NAIVE] - values[ROTATED])
    if not by_text:
        return Checked(dtype, 0, 0.0, 0.0, 0.0)
    estimate = bootstrap([float(np.mean(values)) for values in by_text.values()])
    return Checked(dtype, estimate.n, estimate.value, estimate.low, estimate.high)
