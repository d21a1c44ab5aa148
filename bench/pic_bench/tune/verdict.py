"""Judges rungs by their records: what each loses, with bounds, and whether measuring on could change that.

The unit is the session: one call of each, and at most `CAP` nats a token. Every rung is tested at the same level, in
the order of the ladder, and the first that is not certified ends it (fixed-sequence testing needs no correction).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from statistics import fmean

import msgspec

from pic_bench.fidelity.record import Probe
from pic_bench.report.stats import Estimate
from pic_bench.tune.bounds import ALPHA, bounds, is_below, num_needed
from pic_bench.tune.config import CAP, Sample, place_of

HOPELESS_ALPHA = 0.2
"""A rung is given up on the first half where its loss is above the budget with so small a chance of error."""


class Verdict(Enum):
    """What the records say of a rung; the value stands in reports."""

    CERTIFIED = "certified"
    HOPELESS = "over the budget in the first half"
    OVER = "over the budget"
    OPEN = "not shown"
    UNTRIED = "not measured"
    CONTROL = "control"
    """Of what cannot be certified."""


class Rung(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rung, the exact hit or the naive control loses. Means over sessions, in nats a token."""

    name: str
    verdict: Verdict
    reuse: float | None
    chosen_on: int
    """Sessions of the first half."""
    chosen_loss: float | None
    """Their mean."""
    sessions: int
    """Of the second half, of which all that follows speaks; of controls, all."""
    loss: Estimate | None = None
    """Capped; each bound holds by itself, at any moment."""
    kl: float | None = None
    """Not capped."""
    worst: float | None = None
    capped: int = 0
    """Sessions at or above the cap."""
    first_kl: float | None = None
    """Of the first token."""
    spliced: float | None = None
    """Share of the prompt tokens of these calls."""
    agreement_loss: Estimate | None = None
    """Share of forced tokens whose likeliest one is another than the full prefill's, less the exact hit's."""
    needed: int | None = None
    """`sessions_needed` of what was measured."""


def judge(name: str, probes: Iterable[Probe], sample: Sample, budget: float) -> Rung:
    """What the records say of one arm of the ladder."""
    every = list(probes)
    first, second = _halves(_of(every, name), sample)
    losses = _losses(second)
    if not first and not second:
        verdict = Verdict.UNTRIED
    elif is_below(losses, budget / CAP):
        verdict = Verdict.CERTIFIED
    elif bounds(losses).low > budget / CAP:
        verdict = Verdict.OVER
    elif bounds(_losses(first), HOPELESS_ALPHA).low > budget / CAP:
        verdict = Verdict.HOPELESS
    else:
        verdict = Verdict.OPEN
    rung = _figures(name, verdict, second, every, sample)
    chosen_loss = fmean(_losses(first)) * CAP if first else None
    return msgspec.structs.replace(rung, chosen_on=len(first), chosen_loss=chosen_loss)


def judge_control(name: str, probes: Iterable[Probe], sample: Sample, budget: float) -> Rung:
    """What the records of both halves say of an arm that is no setting: `OVER` if it fails, as the naive one must."""
    every = list(probes)
    found = _of(every, name)
    verdict = Verdict.OVER if bounds(_losses(found)).low > budget / CAP else Verdict.CONTROL
    return _figures(name, verdict, found, every, sample)


def sessions_needed(name: str, probes: Iterable[Probe], budget: float) -> int | None:
    """Sessions of the second half that would certify an arm, as far as all of its losses tell; None where none would.

    Of no records, how many it takes where nothing is lost.
    """
    return num_needed(_losses(_of(probes, name)), budget / CAP)


def is_settled(rung: Rung, probes: Iterable[Probe], sample: Sample, budget: float) -> bool:
    """Whether a rung will not be certified even if every session to come loses nothing."""
    if rung.verdict in (Verdict.HOPELESS, Verdict.OVER):
        return True
    _, second = _halves(_of(probes, rung.name), sample)
    to_come = sample.sessions - sample.num_choosing - len(second)
    return not is_below(_losses(second) + [0.0] * to_come, budget / CAP)


def _of(probes: Iterable[Probe], arm: str) -> list[Probe]:
    return sorted((probe for probe in probes if probe.arm == arm), key=lambda probe: place_of(probe.prompt))


def _halves(probes: Sequence[Probe], sample: Sample) -> tuple[list[Probe], list[Probe]]:
    at = sum(place_of(probe.prompt) < sample.num_choosing for probe in probes)
    return list(probes[:at]), list(probes[at:])


def _losses(probes: Iterable[Probe]) -> list[float]:
    """In [0, 1], of the cap."""
    return [min(probe.forced_kl or 0.0, CAP) / CAP for probe in probes]


def _figures(name: str, verdict: Verdict, probes: Sequence[Probe], every: Iterable[Probe], sample: Sample) -> Rung:
    untold = Rung(
        name=name, verdict=verdict, reuse=sample.reuse.get(name), chosen_on=0, chosen_loss=None, sessions=len(probes)
    )
    if not probes:
        return untold
    floor = {probe.prompt: probe.forced_agreement or 0.0 for probe in every if probe.arm == "exact"}
    kls = [probe.forced_kl or 0.0 for probe in probes]
    lost = [floor[probe.prompt] - (probe.forced_agreement or 0.0) for probe in probes if probe.prompt in floor]
    return msgspec.structs.replace(
        untold,
        loss=_estimate(_losses(probes), 0.0, CAP),
        kl=fmean(kls),
        worst=max(kls),
        capped=sum(kl >= CAP for kl in kls),
        first_kl=fmean(probe.kl for probe in probes),
        spliced=sum(probe.chunk_hit_tokens for probe in probes) / sum(probe.prompt_tokens for probe in probes),
        agreement_loss=_estimate([(one + 1) / 2 for one in lost], -1.0, 1.0) if lost else None,
    )


def _estimate(values: Sequence[float], least: float, most: float) -> Estimate:
    """The mean of values in [0, 1] with bounds, on the scale from `least` to `most`."""
    low, high = bounds(values, ALPHA)
    value, low, high = (least + (most - least) * one for one in (fmean(values), low, high))
    return Estimate(value=value, low=low, high=high, n=len(values))
