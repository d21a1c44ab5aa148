"""What a run says: questions that the records answer with yes or no, or leave open, with the figures in words.

An answer needs enough prompts, and a bootstrap interval on one side of zero. It must not know tables or pictures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pic_bench.fidelity.numbers import divergence, number, score, share, signed, with_interval
from pic_bench.fidelity.panels import Panel, pair_arms
from pic_bench.fidelity.record import Donors, Experiment, Probe
from pic_bench.fidelity.rules import too_few, within
from pic_bench.fidelity.summary import Claim, Limits, Verdict, seam_of
from pic_bench.fidelity.trace_claims import trace_claims
from pic_bench.report.stats import Estimate, bootstrap, bootstrap_difference

__all__ = ["make_claims"]

NAIVE = "Do keys that are not rotated do harm?"
FIRST = "Does recomputing the first token of a run help?"
LONGER = "Does a longer seam help more than one token?"
FLOOR = "Is a spliced answer further from the full prefill than an exact prefix hit?"
DONORS = "Are rows computed alone worse than rows computed in another context?"
RUNS = "Do more runs cost more?"
SHIFT = "Does moving a run further cost more?"
SCORE = "Do answers to questions score otherwise?"
SPLICED = (Donors.ISOLATED, Donors.CONTEXT)
Pairs = Sequence[tuple[Probe, Probe]]


class _Evidence(NamedTuple):
    """A paired difference; a prompt counts once however many of its records are pooled, and intervals draw units."""

    first: float
    second: float
    difference: Estimate
    higher: float
    """Share of prompts on which the first is higher."""
    num_units: int

    def few(self, limits: Limits) -> str | None:
        """What there is too little of for a claim; None where there is enough."""
        return too_few(self.difference.n, self.num_units, ("prompts", "independent texts"), limits)


def make_claims(panels: Sequence[Panel], limits: Limits) -> list[Claim]:
    """All answers, by question; an experiment that was not run asks nothing."""
    claims: list[Claim] = []
    grid = _by_dtype(panels, Experiment.GRID)
    for dtype, some in grid.items():
        claims += _grid_claims(dtype, some, limits)
    for dtype, some in _by_dtype(panels, Experiment.SHIFT).items():
        claims += _shift_claims(dtype, some, limits)
    for panel in panels:
        if panel.experiment is Experiment.QA:
            claims += _score_claims(panel, limits)
        elif panel.experiment is Experiment.TRACE:
            claims += trace_claims(panel, panels, limits)
    asked = list(dict.fromkeys(claim.question for claim in claims))
    return sorted(claims, key=lambda claim: asked.index(claim.question))


def _grid_claims(dtype: str, panels: Sequence[Panel], limits: Limits) -> Iterator[Claim]:
    for donors in SPLICED:
        seams = {s for p in panels for d, arm in p.arms if d is donors and (s := seam_of(arm)) is not None}
        if not seams:
            continue
        where = f"{dtype}, grid, donors {_where(donors)}"
        longest = f"seam-{max(seams)}"
        yield from _compared(NAIVE, where, panels, donors, ("naive", "not rotated"), ("seam-1", "rotated"), limits)
        yield from _compared(FIRST, where, panels, donors, ("seam-0", "seam 0"), ("seam-1", "seam 1"), limits)
        if max(seams) > 1:
            second = (longest, longest.replace("-", " "))
            yield from _compared(LONGER, where, panels, donors, ("seam-1", "seam 1"), second, limits)
        floor = next((name for p in panels if (name := p.floor(donors))), None)
        if floor is not None:
            yield from _compared(FLOOR, where, panels, donors, ("seam-1", "spliced, seam 1"), (floor, floor), limits)
        yield from _ends(RUNS, where, panels, donors, lambda p: p.num_blocks, "runs", limits)
    pairs = [pair for p in panels for pair in pair_arms(*(p.arm("seam-1", donors) for donors in SPLICED)).pairs]
    if pairs:
        yield _claim(DONORS, f"{dtype}, grid", pairs, ("donors alone, seam 1", "donors in context"), limits)


def _shift_claims(dtype: str, panels: Sequence[Panel], limits: Limits) -> Iterator[Claim]:
    for donors in Donors:
        where = f"{dtype}, shift, donors {_where(donors)}"
        yield from _compared(NAIVE, where, panels, donors, ("naive", "not rotated"), ("seam-1", "rotated"), limits)
        yield from _ends(SHIFT, where, panels, donors, lambda p: p.shift, "positions", limits)


def _score_claims(panel: Panel, limits: Limits) -> Iterator[Claim]:
    """Of the default, and of the longest seam, which splices every document; on the prompts that each splices."""
    full = {unit: probe for unit, probe in panel.arm("full", Donors.NONE).items() if probe.score is not None}
    for donors in SPLICED:
        seams = [seam for d, arm in panel.arms if d is donors and (seam := seam_of(arm)) is not None]
        for arm in (limits.default_policy, f"seam-{max(seams, default=0)}"):
            pairs = [pair for pair in pair_arms(panel.arm(arm, donors), full).pairs if pair[0].score is not None]
            if pairs:
                where = f"{panel.dtype}, {panel.source}, donors {_where(donors)}, {arm.replace('-', ' ')}"
                naive = pair_arms(panel.arm("naive", donors), full).pairs
                yield _score_claim(where, pairs, naive, limits)


def _score_claim(where: str, pairs: Pairs, naive: Pairs, limits: Limits) -> Claim:
    spliced = [pair for pair in pairs if pair[0].chunk_hit_tokens]
    if not spliced:
        text = f"Nothing was spliced on any of {len(pairs)} prompts, so there is nothing to compare."
        return Claim(question=SCORE, where=where, verdict=Verdict.OPEN, text=text, n=0)
    evidence = _evidence(spliced, lambda probe: probe.score or 0.0)
    change, middle = evidence.difference, evidence.second
    text = f"score {score(evidence.first)} against {score(middle)} of the full prefill, "
    text += f"{with_interval(change, signed(score))} by prompt (n = {change.n}"
    text += f", nothing was spliced on {len(pairs) - len(spliced)} more)" if len(spliced) < len(pairs) else ")"
    if unrotated := [pair for pair in naive if pair[0].score is not None and pair[0].chunk_hit_tokens]:
        other = _evidence(unrotated, lambda probe: probe.score or 0.0).difference
        text += f"; not rotated {with_interval(other, signed(score))} (n = {other.n})"
    if middle < limits.competent_score:
        verdict = Verdict.OPEN
        text = f"the full prefill itself scores {score(middle)}, below {limits.competent_score:g} (n = {change.n})"
    elif few := evidence.few(limits):
        verdict, text = Verdict.OPEN, f"only {few}: {text}"
    elif change.excludes_zero:
        verdict, text = Verdict.YES, f"{'lower' if change.high < 0 else 'higher'}: {text}"
    elif within(change, evidence.num_units, limits):
        verdict, text = Verdict.NO, f"the interval lies within {limits.margin:g}: {text}"
    else:
        verdict, text = Verdict.OPEN, f"the interval includes zero: {text}"
    return Claim(question=SCORE, where=where, verdict=verdict, text=_sentence(text), n=change.n)


def _compared(
    question: str,
    where: str,
    panels: Sequence[Panel],
    donors: Donors,
    first: tuple[str, str],
    second: tuple[str, str],
    limits: Limits,
) -> Iterator[Claim]:
    """Whether the first arm's KL is higher, over all panels; arms are given by name and in words."""
    pairs = [pair for p in panels for pair in pair_arms(p.arm(first[0], donors), p.arm(second[0], donors)).pairs]
    if pairs:
        yield _claim(question, where, pairs, (first[1], second[1]), limits)


def _claim(question: str, where: str, pairs: Pairs, words: tuple[str, str], limits: Limits) -> Claim:
    kl = _evidence(pairs, lambda probe: probe.kl)
    text = f"mean KL {divergence(kl.first)} ({words[0]}) against {divergence(kl.second)} ({words[1]}), "
    text += f"{with_interval(kl.difference, signed(divergence))} by prompt (n = {kl.difference.n}), "
    text += f"higher on {share(kl.higher)} of the prompts; {_agreement(pairs, limits)}"
    text += f"; cosine {number(_mean(a.cosine for a, _ in pairs))} against {number(_mean(b.cosine for _, b in pairs))}"
    return _answer(question, where, kl.difference, kl.few(limits), text)


def _ends(
    question: str,
    where: str,
    panels: Sequence[Panel],
    donors: Donors,
    place: Callable[[Panel], int | None],
    unit: str,
    limits: Limits,
) -> Iterator[Claim]:
    """Whether seam 1 has a higher KL at the largest place than at the smallest; paired where they share texts."""
    at: dict[int, dict[str, float]] = defaultdict(dict)
    for panel in panels:
        if (where_ := place(panel)) is not None:
            at[where_] |= {f"{probe.source} {probe.unit}": probe.kl for probe in panel.arm("seam-1", donors).values()}
    found = sorted(number_ for number_, values in at.items() if values)
    if len(found) < 2:
        return
    least, most = at[found[0]], at[found[-1]]
    if shared := [text for text in most if text in least]:
        difference = bootstrap([most[text] - least[text] for text in shared])
        paired = f"by passage (n = {len(shared)})"
    else:
        difference = bootstrap_difference(list(most.values()), list(least.values()))
        paired = f"prompts not paired (n = {len(most)} and {len(least)})"
    text = f"mean KL {divergence(_mean(most.values()))} ({found[-1]:,} {unit}) "
    text += f"against {divergence(_mean(least.values()))} ({found[0]:,}), "
    text += f"{with_interval(difference, signed(divergence))}, {paired}; seam 1"
    few = too_few(difference.n, difference.n, ("prompts", "prompts"), limits)
    yield _answer(question, where, difference, few, text)


def _answer(question: str, where: str, difference: Estimate, few: str | None, text: str) -> Claim:
    """Yes where the difference is above zero, no where it is below, else open with the reason."""
    if few:
        verdict, text = Verdict.OPEN, f"only {few}: {text}"
    elif difference.excludes_zero:
        verdict = Verdict.YES if difference.low > 0 else Verdict.NO
        text = text if difference.low > 0 else f"it is the other way round: {text}"
    else:
        verdict, text = Verdict.OPEN, f"no difference can be shown, the interval includes zero: {text}"
    return Claim(question=question, where=where, verdict=verdict, text=_sentence(text), n=difference.n)


def _agreement(pairs: Pairs, limits: Limits) -> str:
    """Top-1 agreement of both, over decided prompts only where the model is undecided on most."""
    kept, note = pairs, ""
    if float(np.median([first.top1_probability for first, _ in pairs])) < limits.competent_probability:
        kept = [pair for pair in pairs if pair[0].top1_probability >= limits.decided_probability]
        note = f" on the {len(kept)} decided records"
    if len(kept) < limits.min_prompts:
        few = "the model is decided on too few" if note else f"fewer than {limits.min_prompts} records"
        return f"agreement is left out, {few}"
    agreement = _evidence(kept, lambda probe: float(probe.top1_agrees))
    difference = with_interval(agreement.difference, lambda value: f"{value * 100:+.1f}")
    return f"top-1 agreement {share(agreement.first)} against {share(agreement.second)}, {difference} points{note}"


def _evidence(pairs: Pairs, value: Callable[[Probe], float]) -> _Evidence:
    by_prompt: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for first, second in pairs:
        by_prompt[first.source, first.prompt, first.unit].append((value(first), value(second)))
    means = np.array([np.mean(values, axis=0) for values in by_prompt.values()])
    differences = means[:, 0] - means[:, 1]
    units = [(source, unit) for source, _, unit in by_prompt]
    return _Evidence(
        first=float(means[:, 0].mean()),
        second=float(means[:, 1].mean()),
        difference=bootstrap(differences.tolist(), units=units),
        higher=float(np.mean(differences > 0)),
        num_units=len(set(units)),
    )


def _by_dtype(panels: Sequence[Panel], experiment: Experiment) -> dict[str, list[Panel]]:
    found: dict[str, list[Panel]] = defaultdict(list)
    for panel in panels:
        if panel.experiment is experiment:
            found[panel.dtype].append(panel)
    return found


def _where(donors: Donors) -> str:
    return {Donors.ISOLATED: "alone", Donors.CONTEXT: "in context"}.get(donors, donors.value)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
