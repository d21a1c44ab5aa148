"""The check that CI makes of a run: keys that are not rotated must do harm, or the measurement could not see any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pic_bench.fidelity.record import Experiment, Probe
from pic_bench.report.stats import bootstrap

ROTATED = "seam-1"
NAIVE = "naive"
_MIN_SHIFT = 16
"""A key turned by fewer positions is hardly turned."""


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
    found: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
    for probe in probes:
        moved = _MIN_SHIFT if probe.experiment is Experiment.GRID else probe.shift or 0
        passage = probe.experiment in (Experiment.GRID, Experiment.SHIFT)
        if passage and moved >= _MIN_SHIFT and probe.arm in (ROTATED, NAIVE) and probe.forced_kl is not None:
            found[probe.dtype, probe.source, probe.unit, probe.prompt, probe.donors][probe.arm] = probe.forced_kl
    by_text: dict[object, dict[object, list[float]]] = {dtype: defaultdict(list) for dtype, *_ in found}
    for (dtype, source, unit, _, _), values in found.items():
        if len(values) == 2:
            by_text[dtype][source, unit].append(values[NAIVE] - values[ROTATED])
    means = {dtype: [float(np.mean(values)) for values in texts.values()] for dtype, texts in by_text.items()}
    return [_check(str(dtype), differences) for dtype, differences in means.items()]


def _check(dtype: str, differences: Sequence[float]) -> Checked:
    if not differences:
        return Checked(dtype, 0, 0.0, 0.0, 0.0)
    estimate = bootstrap(differences)
    return Checked(dtype, estimate.n, estimate.value, estimate.low, estimate.high)
