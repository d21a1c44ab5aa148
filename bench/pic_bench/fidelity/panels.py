"""Raw records grouped by arm and place, so that arms are compared prompt by prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pic_bench.fidelity.record import Donors, Experiment, Probe
from pic_bench.fidelity.summary import CONTROLS, Thresholds

Unit = tuple[int | None, str]
"""A prompt, with its number of blocks: a prompt's name alone need not tell panels apart."""
Arm = dict[Unit, Probe]


@dataclass(slots=True)
class Panel:
    """All arms at one place of an experiment."""

    experiment: Experiment
    dtype: str
    source: str
    num_blocks: int | None
    shift: int | None
    min_chunk_hit: int = 0
    arms: dict[tuple[Donors, str], Arm] = field(default_factory=lambda: defaultdict(dict))

    def arm(self, name: str, donors: Donors) -> Arm:
        """The records of an arm with these donors; a control's whatever the donors; empty where there are none."""
        found = self.arms.get((donors, name))
        if found is None and name in CONTROLS:
            found = next((arm for (_, other), arm in self.arms.items() if other == name), None)
        return found or {}

    def floor(self, donors: Donors) -> str | None:
        """The control that shows what differs with nothing spliced: the exact hit, else the full prefill again."""
        return next((name for name in ("exact", "retest") if self.arm(name, donors)), None)


class Pairing(NamedTuple):
    """Records of two arms on the same prompts, and how many prompts one of the two lacks."""

    pairs: list[tuple[Probe, Probe]]
    unpaired: int


def make_panels(probes: Iterable[Probe], thresholds: Thresholds) -> tuple[list[Panel], int]:
    """Group records; of several of one prompt and arm the last counts, and the number of the others is returned.

    A trace with a default policy is looked at twice: all its calls, and those that reuse much under it; once where no
    other calls were measured.
    """
    panels: dict[tuple[object, ...], Panel] = {}
    repeated = 0
    for probe in probes:
        shift = probe.shift if probe.experiment is Experiment.SHIFT else None
        varied = probe.experiment in (Experiment.GRID, Experiment.SHIFT, Experiment.COMPOSE)
        num_blocks = probe.num_blocks if varied else None
        key = (probe.experiment, probe.dtype, probe.source, num_blocks, shift)
        panel = panels.setdefault(key, Panel(*key))  # type: ignore[arg-type]
        arm = panel.arms[probe.donors, probe.arm]
        unit = (probe.num_blocks, probe.prompt)
        repeated += unit in arm
        arm[unit] = probe
    ordered = sorted(panels.values(), key=_order)
    return [part for panel in ordered for part in _looks(panel, thresholds)], repeated


def pair_arms(first: Mapping[Unit, Probe], second: Mapping[Unit, Probe]) -> Pairing:
    """Pair two arms by prompt."""
    pairs = [(probe, second[unit]) for unit, probe in first.items() if unit in second]
    return Pairing(pairs, len(first.keys() | second.keys()) - len(pairs))


def _looks(panel: Panel, thresholds: Thresholds) -> list[Panel]:
    """The panel, and the calls of a trace that reuse much under the default policy; once where these are all."""
    default = next((arm for (_, name), arm in panel.arms.items() if name == thresholds.default_policy), {})
    kept = {unit for unit, probe in default.items() if probe.chunk_hit_tokens >= thresholds.min_chunk_hit}
    if panel.experiment is not Experiment.TRACE or not kept:
        return [panel]
    arms = {key: {unit: p for unit, p in arm.items() if unit in kept} for key, arm in panel.arms.items()}
    arms = {key: arm for key, arm in arms.items() if arm}
    reusing = replace(panel, min_chunk_hit=thresholds.min_chunk_hit, arms=arms)
    return [reusing] if arms == panel.arms else [panel, reusing]


def _order(panel: Panel) -> tuple[object, ...]:
    """Experiments as they are declared, float32 before bfloat16, then data, blocks, shift."""
    experiment = list(Experiment).index(panel.experiment)
    dtype = (panel.dtype != "float32", panel.dtype)
    return experiment, dtype, panel.source, panel.num_blocks or 0, panel.shift or 0
