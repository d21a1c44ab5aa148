"""Judges rungs by their records: what each loses, with bounds, and whether measuring on could change that.

The unit is the session: one call of each, and at most `CAP` nats a token. Every rung is tested at the same level, in
the order of the ladder, and the first that is not certified ends it (fixed-sequence testing needs no correction). The
calls behind changed fields are tested by themselves, at that level too: a rung must pass both tests, so that one which
should fail either passes no more often. Only where the sample has too few of them to pass is the first test enough.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

import msgspec

from pic_bench.fidelity.compared import count_sure
from pic_bench.fidelity.record import Probe
from pic_bench.fidelity.summary import Flips
from pic_bench.report.stats import Estimate
from pic_bench.tune.bounds import bounds, is_below, num_needed
from pic_bench.tune.config import CAP, FLIPPED, NAIVE, Sample, place_of

HOPELESS_ALPHA = 0.2
"""A rung is given up on the first half where its loss is above the budget with so small a chance of error."""
EXACT = "exact"
MUST_FAIL = (NAIVE, FLIPPED)  # controls, the second for where the first does no harm


class Verdict(Enum):
    """What the records say of an arm; the value stands in reports."""

    CERTIFIED = "certified"
    HOPELESS = "over the budget in the first half"
    OVER = "over the budget"
    OVER_CHANGED = "over the budget behind changed fields"
    OPEN = "not shown"
    UNTRIED = "not measured"
    CONTROL = "control"  # of exact hits, and of a control that is not over the budget


class Rung(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one arm loses. Means over sessions, in nats a token."""

    name: str
    verdict: Verdict
    reuse: float | None
    """Share of the prefix cache's misses on all logs."""
    chosen_on: int = 0
    """Sessions of the first half."""
    chosen_loss: float | None = None
    sessions: int = 0
    """Of the second half, of which all that follows speaks; of controls, all."""
    loss: Estimate | None = None
    """Capped."""
    kl: float | None = None
    """Not capped."""
    worst: float | None = None
    first_kl: float | None = None
    spliced: float | None = None
    """Share of the prompt tokens of these calls."""
    sure: Flips | None = None
    """Forced tokens of which the full prefill is sure, and those whose likeliest one is another."""
    sure_loss: Estimate | None = None
    """Of a session's sure tokens the share that is another's beyond the exact hit's, capped; paired by call."""
    agreement_loss: Estimate | None = None
    """Share of forced tokens whose likeliest one is another than the full prefill's, less the exact hit's."""
    needed: int | None = None
    """Sessions of the second half that would certify it, as far as all of its losses tell; None where none would."""
    changed: int = 0
    """Sessions, of those with losses, with a call behind a changed field that was measured for that."""
    changed_loss: Estimate | None = None
    """Of these calls, capped."""


@dataclass(slots=True)
class Judge:
    """Judges by the records so far; more may be added."""

    sample: Sample
    budget: float
    probes: list[Probe]

    def judge(self, name: str) -> Rung:
        """What the records say of an arm; of a control that must fail `OVER` if it does.

        It does where it is shown to lose more than exact hits do, and its mean is over the budget.
        """
        every, changed, is_control = self._of(name), self._behind_change(name), name in (EXACT, *MUST_FAIL)
        at = 0 if is_control else self._num_choosing(every)
        first, second = every[:at], every[at:]
        if not is_control:
            changed = changed[self._num_choosing(changed) :]
            verdict = self._verdict(*map(_losses, (first, second, changed)))
        else:
            verdict = self._control(name, _losses(second))
        rung = Rung(name=name, verdict=verdict, reuse=self.sample.reuse.get(name), chosen_on=at, sessions=len(second))
        if first:
            rung = msgspec.structs.replace(rung, chosen_loss=fmean(_losses(first)) * CAP)
        if changed:
            loss = _estimate(_losses(changed), 0.0, CAP)
            rung = msgspec.structs.replace(rung, changed=len(changed), changed_loss=loss)
        return msgspec.structs.replace(rung, **self._figures(second)) if second else rung

    @property
    def sees_harm(self) -> bool:
        """Whether a control failed, without which nothing is certified."""
        return any(self.judge(name).verdict is Verdict.OVER for name in MUST_FAIL)

    def is_decided(self, name: str, *, may_fail: bool) -> bool:
        """Whether every drawn call is measured, or no more of them can change the verdict.

        Args:
            may_fail: whether it is enough to know that a rung will not be certified, even if nothing more is lost.
        """
        if name in MUST_FAIL and self.sees_harm:
            return True
        rung = self.judge(name)
        if sum(probe.arm == name for probe in self.probes) == self.sample.num_measured:
            return True
        failed = rung.verdict in (Verdict.HOPELESS, Verdict.OVER, Verdict.OVER_CHANGED)
        if failed or name in MUST_FAIL or not may_fail:
            return failed and may_fail
        to_come = self.sample.sessions - self.sample.num_choosing - rung.sessions
        losses = _losses(self._of(name)[rung.chosen_on :])
        return not is_below([*losses, *[0.0] * to_come], self._limit)

    def needed(self, name: str) -> int | None:
        """`Rung.needed`; of no records, what it takes where nothing is lost."""
        needed, changed = num_needed(_losses(self._of(name)), self._limit), _losses(self._behind_change(name))
        if needed is None or not changed or self._has_too_few_changed:
            return needed
        behind = num_needed(changed, self._limit)
        return behind and max(needed, math.ceil(behind * self.sample.sessions / len(self.sample.changed)))

    @property
    def _limit(self) -> float:
        return self.budget / CAP

    @property
    def _has_too_few_changed(self) -> bool:
        """Whether the calls behind changed fields would not pass even if they lost nothing."""
        return not is_below([0.0] * self.sample.num_changed, self._limit)

    def _of(self, name: str, among: Collection[str] | None = None) -> list[Probe]:
        """The records of an arm in the order in which they were served, of the calls drawn from all by default."""
        wanted = self.sample.drawn if among is None else among
        found = (probe for probe in self.probes if probe.arm == name and probe.prompt in wanted)
        return sorted(found, key=lambda probe: place_of(probe.prompt))

    def _behind_change(self, name: str) -> list[Probe]:
        return self._of(name, self.sample.changed)

    def _num_choosing(self, probes: Iterable[Probe]) -> int:
        return sum(place_of(probe.prompt) < self.sample.num_choosing for probe in probes)

    def _control(self, name: str, losses: Sequence[float]) -> Verdict:
        if not losses or fmean(losses) <= self._limit:
            return Verdict.CONTROL
        worse = bounds(losses).low > bounds(_losses(self._of(EXACT))).high
        return Verdict.OVER if name in MUST_FAIL and worse else Verdict.CONTROL

    def _verdict(self, first: Sequence[float], second: Sequence[float], changed: Sequence[float]) -> Verdict:
        if bounds(second).low > self._limit:
            return Verdict.OVER
        if bounds(changed).low > self._limit:
            return Verdict.OVER_CHANGED
        within = is_below(changed, self._limit)
        if self._has_too_few_changed:
            within = fmean(changed or [0.0]) <= self._limit
        if within and is_below(second, self._limit):
            return Verdict.CERTIFIED
        if bounds(first, HOPELESS_ALPHA).low > self._limit:
            return Verdict.HOPELESS
        return Verdict.OPEN if first or second else Verdict.UNTRIED

    def _figures(self, probes: Sequence[Probe]) -> dict[str, Estimate | Flips | float | None]:
        floor = {probe.prompt: probe for probe in self._of(EXACT)}
        pairs = [(probe, floor[probe.prompt]) for probe in probes if probe.prompt in floor]
        lost = [(exact.forced_agreement or 0.0) - (probe.forced_agreement or 0.0) for probe, exact in pairs]
        flipped = [
            ((probe.sure_flips or 0) - (exact.sure_flips or 0)) / probe.sure_tokens
            for probe, exact in pairs
            if probe.sure_tokens
        ]
        kls = [probe.forced_kl or 0.0 for probe in probes]
        return {
            "loss": _estimate(_losses(probes), 0.0, CAP),
            "kl": fmean(kls),
            "worst": max(kls),
            "first_kl": fmean(probe.kl for probe in probes),
            "spliced": sum(probe.chunk_hit_tokens for probe in probes) / sum(probe.prompt_tokens for probe in probes),
            "sure": count_sure(probes),
            "sure_loss": _estimate([min(max(one, 0.0), CAP) / CAP for one in flipped], 0.0, CAP) if flipped else None,
            "agreement_loss": _estimate([(one + 1) / 2 for one in lost], -1.0, 1.0) if lost else None,
        }


def _losses(probes: Iterable[Probe]) -> list[float]:
    """In [0, 1], of the cap."""
    return [min(probe.forced_kl or 0.0, CAP) / CAP for probe in probes]


def _estimate(values: Sequence[float], least: float, most: float) -> Estimate:
    """The mean of values in [0, 1] with bounds, on the scale from `least` to `most`."""
    low, high = bounds(values)
    value, low, high = (least + (most - least) * one for one in (fmean(values), low, high))
    return Estimate(value=value, low=low, high=high, n=len(values))
