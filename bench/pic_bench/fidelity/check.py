"""The check that CI makes of a run: keys that are not rotated must do harm, or the measurement could not see any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pic_bench.fidelity.record import Experiment, Probe
from pic_bench.report.stats import Estimate, bootstrap

_MIN_SHIFT = 16
"""A key turned by fewer positions is hardly turned."""


class Checked(NamedTuple):
    """One number format: by how much the naive arm's KL is above the rotated one's; None where no text has both."""

    dtype: str
    difference: Estimate | None

    @property
    def holds(self) -> bool:
        """Whether the naive arm is worse, beyond chance."""
        return self.difference is not None and self.difference.low > 0

    def __str__(self) -> str:
        if (found := self.difference) is None:
            return f"check FAILS: {self.dtype}: no text has both arms"
        return (
            f"check {'holds' if self.holds else 'FAILS'}: {self.dtype}: mean KL without rotation less with it "
            f"{found.value:.4g} [{found.low:.4g}, {found.high:.4g}] over {found.n} texts"
        )


def check_naive(probes: Sequence[Probe]) -> list[Checked]:
    """The check for every number format that has an arm on GRID or SHIFT; a text counts once.

    The KL is the mean over the gold continuation: less noisy than that of one token.
    """
    found: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
    for probe in probes:
        moved = {Experiment.GRID: _MIN_SHIFT, Experiment.SHIFT: probe.shift or 0}.get(probe.experiment, 0)
        if moved >= _MIN_SHIFT and probe.arm in ("naive", "seam-1") and probe.forced_kl is not None:
            found[probe.dtype, probe.source, probe.unit, probe.prompt, probe.donors][probe.arm] = probe.forced_kl
    texts: dict[object, dict[object, list[float]]] = {dtype: defaultdict(list) for dtype, *_ in found}
    for (dtype, source, unit, _, _), values in found.items():
        if len(values) == 2:
            texts[dtype][source, unit].append(values["naive"] - values["seam-1"])
    means = {dtype: [float(np.mean(values)) for values in of.values()] for dtype, of in texts.items()}
    return [Checked(str(dtype), bootstrap(values) if values else None) for dtype, values in means.items()]
