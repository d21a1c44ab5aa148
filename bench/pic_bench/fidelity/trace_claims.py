"""What a policy costs in agreement and saves in tokens on a trace, said from the records.

It must not know tables or pictures. Calls of one conversation resemble each other, so intervals are over sessions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pic_bench.fidelity.cells import computed_tokens
from pic_bench.fidelity.numbers import divergence, points, share, with_interval
from pic_bench.fidelity.panels import Panel, pair_arms
from pic_bench.fidelity.record import Donors, Probe
from pic_bench.fidelity.rules import not_below, too_few, within
from pic_bench.fidelity.summary import CONTROLS, Claim, Limits, Verdict
from pic_bench.report.stats import Estimate, bootstrap, median

__all__ = ["trace_claims"]

COST = "Does the default policy lose agreement against exact prefix hits?"
CHEAPEST = "Does a policy keep the agreement of exact prefix hits?"


class _Policy(NamedTuple):
    name: str
    pairs: list[tuple[Probe, Probe]]
    agreement: Estimate
    """Of the policy less that of exact hits, over the calls that count."""
    sessions: int
    """That these calls come from."""
    computed: float
    """Computed tokens as a share of those with exact hits."""


def trace_claims(panel: Panel, panels: Sequence[Panel], limits: Limits) -> Iterator[Claim]:
    """What the calls that reuse much say, or all calls where there is no such panel of the same trace."""
    same = [p for p in panels if (p.experiment, p.dtype, p.source) == (panel.experiment, panel.dtype, panel.source)]
    if panel.min_chunk_hit < max(p.min_chunk_hit for p in same):
        return
    exact = panel.arm("exact", Donors.NONE)
    policies, measured, undecided = [], False, False
    for donors, name in panel.arms:
        # The naive arm is a control too: nobody would serve under it.
        pairs = pair_arms(panel.arm(name, donors), exact).pairs if name not in (*CONTROLS, "naive") else []
        if not pairs:
            continue
        measured = True
        probability = median([first.top1_probability for first, _ in pairs]) or 0.0
        kept = pairs
        if probability < limits.competent_probability:
            undecided = True
            kept = [pair for pair in pairs if pair[0].top1_probability >= limits.decided_probability]
        if not kept:
            continue
        units = [first.unit for first, _ in kept]
        change = bootstrap([float(a.top1_agrees) - float(b.top1_agrees) for a, b in kept], units=units)
        stock = sum(computed_tokens(b) for _, b in pairs)
        computed = sum(computed_tokens(a) for a, _ in pairs) / max(1, stock)
        policies.append(_Policy(name, pairs, change, len(set(units)), computed))
    where = f"{panel.dtype}, {panel.source}"
    if panel.min_chunk_hit:
        where += f", calls with {panel.min_chunk_hit} or more chunk-hit tokens"
    if undecided:
        where += f", agreement on decided calls (likeliest token {limits.decided_probability:g} or more)"
    default = next((policy for policy in policies if policy.name == limits.default_policy), None)
    if default is not None:
        yield _cost(default, where, limits)
    if policies:
        yield _cheapest(policies, where, limits)
    elif measured:
        text = "The model is decided on no call, so agreement says nothing."
        yield Claim(question=COST, where=where, verdict=Verdict.OPEN, text=text, n=0)


def _cost(policy: _Policy, where: str, limits: Limits) -> Claim:
    change = policy.agreement
    kls = [(a.kl, b.kl) for a, b in policy.pairs]
    text = f"{_says(policy)}; median KL {divergence(median([a for a, _ in kls]) or 0.0)} against "
    text += f"{divergence(median([b for _, b in kls]) or 0.0)}, mean {divergence(sum(a for a, _ in kls) / len(kls))} "
    text += f"against {divergence(sum(b for _, b in kls) / len(kls))} (n = {len(kls)})."
    if few := _few(policy, limits):
        return _open(COST, where, change, f"Only {few}: {text}")
    if change.excludes_zero:
        return Claim(
            question=COST, where=where, verdict=Verdict.YES if change.high < 0 else Verdict.NO, text=text, n=change.n
        )
    if within(change, policy.sessions, limits):
        text = f"The interval lies within {limits.margin * 100:g} points: {text}"
        return Claim(question=COST, where=where, verdict=Verdict.NO, text=text, n=change.n)
    return _open(COST, where, change, f"No difference can be shown, the interval includes zero: {text}")


def _cheapest(policies: Sequence[_Policy], where: str, limits: Limits) -> Claim:
    """The policy that computes least of those whose whole interval lies above the margin."""
    margin = f"{limits.margin * 100:g} points"
    kept = [policy for policy in policies if not_below(policy.agreement, policy.sessions, limits)]
    closest = max(policies, key=lambda policy: (policy.agreement.value, -policy.computed))
    if few := _few(closest, limits):
        return _open(CHEAPEST, where, closest.agreement, f"Only {few}: {_says(closest)}.")
    if not kept:
        text = f"No policy is shown to stay within {margin} of exact hits. The closest: {_says(closest)}."
        lost = all(policy.agreement.high < -limits.margin for policy in policies)
        verdict = Verdict.NO if lost else Verdict.OPEN
        return Claim(question=CHEAPEST, where=where, verdict=verdict, text=text, n=closest.agreement.n)
    cheapest = min(kept, key=lambda policy: policy.computed)
    text = (
        f"Of {len(policies)} policies, {len(kept)} lose less than {margin} with their whole interval. Of these the one "
    )
    text += f"that computes least, picked afterwards: {_says(cheapest)}."
    return Claim(question=CHEAPEST, where=where, verdict=Verdict.YES, text=text, n=cheapest.agreement.n)


def _few(policy: _Policy, limits: Limits) -> str | None:
    return too_few(policy.agreement.n, policy.sessions, ("calls", "sessions"), limits)


def _says(policy: _Policy) -> str:
    change = policy.agreement
    text = f"`{policy.name}` computes {share(policy.computed)} of the tokens of exact hits; top-1 agreement "
    return f"{text}{with_interval(change, points)} points against them (n = {change.n})"


def _open(question: str, where: str, change: Estimate, text: str) -> Claim:
    return Claim(question=question, where=where, verdict=Verdict.OPEN, text=text, n=change.n)
