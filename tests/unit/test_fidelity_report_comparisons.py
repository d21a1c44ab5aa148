"""What a report says is what the records say: every wording can be reached, and nothing is claimed of too little."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from fidelity_records import grid, probe, shifts, trace
from pic_bench.fidelity.claims import DONORS, FIRST, FLOOR, LONGER, NAIVE, RUNS, SCORE, SHIFT, make_claims
from pic_bench.fidelity.panels import make_panels
from pic_bench.fidelity.record import Donors, Experiment, Probe
from pic_bench.fidelity.summary import Claim, Limits, Verdict
from pic_bench.fidelity.trace_claims import CHEAPEST, COST

LIMITS = Limits()


def answers(probes: Sequence[Probe], question: str, limits: Limits = LIMITS) -> list[Claim]:
    return [claim for claim in make_claims(make_panels(probes, limits)[0], limits) if claim.question == question]


def two_arms(
    first: Callable[[int], float], second: Callable[[int], float], prompts: int = 30, **fields: object
) -> list[Probe]:
    """The unrotated and the rotated arm, KL by number of the prompt."""
    kls = {"naive": first, "seam-1": second}
    return [probe(arm=arm, prompt=f"p{i}", kl=kl(i), **fields) for arm, kl in kls.items() for i in range(prompts)]


def test_unrotated_keys_do_harm() -> None:
    (claim,) = answers(two_arms(lambda i: 0.5 + i % 2 / 10, lambda i: 0.01), NAIVE)
    assert (claim.verdict, claim.n) == (Verdict.YES, 30)
    assert claim.where == "float32, grid, donors alone"
    assert claim.text.startswith("Mean KL .55 (not rotated) against .010 (rotated), +.54 [")
    assert "higher on 100 % of the prompts" in claim.text


def test_unrotated_keys_do_good() -> None:
    (claim,) = answers(two_arms(lambda i: 0.01, lambda i: 0.5 + i % 2 / 10), NAIVE)
    assert claim.verdict is Verdict.NO
    assert claim.text.startswith("It is the other way round: mean KL .010 (not rotated) against .55 (rotated), -.54 [")
    assert "higher on 0 % of the prompts" in claim.text


def test_unrotated_keys_do_neither() -> None:
    (claim,) = answers(two_arms(lambda i: 0.1 + (-1) ** i * 0.05, lambda i: 0.1), NAIVE)
    assert claim.verdict is Verdict.OPEN
    assert "No difference can be shown, the interval includes zero" in claim.text


@pytest.mark.parametrize(("prompts", "verdict"), [(19, Verdict.OPEN), (20, Verdict.YES)])
def test_too_few_prompts_claim_nothing(prompts: int, verdict: Verdict) -> None:
    (claim,) = answers(two_arms(lambda i: 0.5 + i / 100, lambda i: 0.01, prompts), NAIVE)
    assert claim.verdict is verdict
    assert ("Only 19 prompts, fewer than 20" in claim.text) is (prompts == 19)


def test_a_prompt_counts_once_however_many_records_it_has() -> None:
    probes = [p for blocks in (1, 2, 4) for p in two_arms(lambda i: 0.5, lambda i: 0.1, 12, num_blocks=blocks)]
    (claim,) = answers(probes, NAIVE)
    assert (claim.verdict, claim.n) == (Verdict.OPEN, 12)


def test_agreement_is_claimed_of_decided_prompts_where_the_model_is_undecided() -> None:
    def at(decided: int) -> str:
        probes = []
        for i in range(60):
            sure = i < decided
            for arm, agrees in (("naive", not sure), ("seam-1", True)):
                probability = 0.8 if sure else 0.1
                probes.append(probe(arm=arm, prompt=f"p{i}", top1_agrees=agrees, top1_probability=probability))
        (claim,) = answers(probes, NAIVE)
        return claim.text

    assert "top-1 agreement 0 % against 100 %, -100.0 [-100.0, -100.0] points on the 25 decided records" in at(25)
    assert "agreement is left out, the model is decided on too few" in at(5)
    assert "top-1 agreement 33.3 % against 100 %" in at(40)


def test_the_grid_s_questions() -> None:
    """The invented records have an effect of the usual direction in each of them, twice: by dtype, and by donors."""
    probes = list(grid())
    for question in (NAIVE, FIRST, LONGER, FLOOR, RUNS):
        found = answers(probes, question)
        assert [claim.verdict for claim in found] == [Verdict.YES] * 4
        wheres = {f"{d}, grid, donors {w}" for d in ("float32", "bfloat16") for w in ("alone", "in context")}
        assert {claim.where for claim in found} == wheres
    assert [claim.verdict for claim in answers(probes, DONORS)] == [Verdict.YES] * 2
    assert "seam 32" in answers(probes, LONGER)[0].text
    assert "(16 runs) against" in answers(probes, RUNS)[0].text
    assert answers(probes, SHIFT) == answers(probes, SCORE) == answers(probes, COST) == []


def test_shifts() -> None:
    probes = list(shifts())
    (claim,) = answers(probes, SHIFT)
    assert claim.verdict is Verdict.OPEN
    assert "(4,096 positions) against" in claim.text
    assert claim.n == 24
    (naive,) = answers(probes, NAIVE)
    assert (naive.verdict, naive.n) == (Verdict.YES, 144)
    worse = [p if p.shift != 4096 or p.arm != "seam-1" else probe_like(p, kl=p.kl * 9) for p in probes]
    assert answers(worse, SHIFT)[0].verdict is Verdict.YES


def probe_like(record: Probe, **fields: object) -> Probe:
    return probe(
        **{name: getattr(record, name) for name in record.__struct_fields__ if name != "schema_version"} | fields
    )


def scored(full: Callable[[int], float], arm: Callable[[int], float], prompts: int = 40) -> list[Probe]:
    common = {"experiment": Experiment.QA, "source": "needle", "donors": Donors.CONTEXT}
    probes = [probe(arm="default", prompt=f"q{i}-0", score=arm(i), **common) for i in range(prompts)]
    common["donors"] = Donors.NONE
    return [*probes, *(probe(arm="full", prompt=f"q{i}-0", score=full(i), **common) for i in range(prompts))]


def test_scores() -> None:
    lost = answers(scored(lambda i: 0.8, lambda i: 0.8 if i % 2 else 0.4), SCORE)
    assert [claim.verdict for claim in lost] == [Verdict.YES]
    assert lost[0].where == "float32, needle, donors in context, default"
    assert lost[0].text.startswith("Lower: score 0.600 against 0.800 of the full prefill, -0.200 [-0.2")
    won = answers(scored(lambda i: 0.4, lambda i: 0.8 if i % 2 else 0.4), SCORE)[0]
    assert won.text.startswith("Higher: ")
    same = answers(scored(lambda i: 0.8, lambda i: 0.8 + (-1) ** i * 0.01, 150), SCORE)[0]
    assert (same.verdict, same.text[:34]) == (Verdict.NO, "The interval lies within 0.02: sco")
    open_ = answers(scored(lambda i: 0.5, lambda i: 0.5 + (-1) ** i * 0.4), SCORE)[0]
    assert (open_.verdict, "The interval includes zero" in open_.text) == (Verdict.OPEN, True)
    beyond = answers(scored(lambda i: 0.1, lambda i: 0.0), SCORE)[0]
    assert beyond.verdict is Verdict.OPEN
    assert beyond.text == "The full prefill itself scores 0.100, below 0.2 (n = 40)."
    few = answers(scored(lambda i: 0.8, lambda i: 0.1, 10), SCORE)[0]
    assert (few.verdict, "Only 10 prompts" in few.text) == (Verdict.OPEN, True)


def policies(
    agreements: dict[str, tuple[float, int]], calls: int = 400, probability: float = 0.8, sessions: int = 400
) -> list[Probe]:
    """Calls of a trace; a policy's share of agreement and its chunk-hit tokens of 1,000 that exact hits compute."""
    probes = []
    for call in range(calls):
        common = {
            "experiment": Experiment.TRACE,
            "num_blocks": None,
            "prompt": f"{call % sessions:03}-{call // sessions:03}",
            "prompt_tokens": 1000,
        }
        common["top1_probability"] = probability
        probes.append(probe(arm="exact", kl=0.0, **common))
        for policy, (agreement, hits) in agreements.items():
            agrees = call < agreement * calls
            probes.append(
                probe(arm=policy, donors=Donors.TRACE, chunk_hit_tokens=hits, top1_agrees=agrees, kl=0.01, **common)
            )
    return probes


def test_a_trace_s_cost() -> None:
    (claim,) = answers(policies({"default": (0.8, 600)}), COST)
    assert (claim.verdict, claim.n) == (Verdict.YES, 400)
    assert claim.where == "float32, sample, calls with 256 or more chunk-hit tokens"
    assert "`default` computes 40.0 % of the tokens of exact hits; top-1 agreement -" in claim.text
    assert "median KL .010 against 0, mean .010 against 0 (n = 400)" in claim.text
    (kept,) = answers(policies({"default": (1.0, 600)}), COST)
    assert (kept.verdict, "The interval lies within 2 points" in kept.text) == (Verdict.NO, True)
    (few,) = answers(policies({"default": (0.5, 600)}, calls=10), COST)
    assert (few.verdict, few.text[:14]) == (Verdict.OPEN, "Only 10 calls,")
    (alike,) = answers(policies({"default": (0.5, 600)}, sessions=19), COST)
    assert (alike.verdict, alike.text[:35]) == (Verdict.OPEN, "Only 19 sessions, fewer than 20: `d")


def test_the_cheapest_policy_that_keeps_agreement() -> None:
    some = {"default": (0.8, 900), "seam-32": (1.0, 600), "seam-64": (1.0, 300)}
    (claim,) = answers(policies(some), CHEAPEST)
    assert claim.verdict is Verdict.YES
    assert "Of 3 policies, 2 lose less than 2 points" in claim.text
    assert "picked afterwards: `seam-32` computes 40.0 %" in claim.text
    (none,) = answers(policies({"default": (0.7, 900), "seam-32": (0.8, 600)}), CHEAPEST)
    assert none.verdict is Verdict.NO
    assert "The closest: `seam-32`" in none.text
    # 1.5 points less, but 2 points and more lie in the interval.
    (unclear,) = answers(policies({"default": (0.985, 900)}), CHEAPEST)
    assert unclear.verdict is Verdict.OPEN
    assert "-1.5 [" in unclear.text


def test_a_trace_is_asked_once_and_of_all_calls_where_none_reuses_much() -> None:
    assert len(answers(list(trace()), COST)) == 1
    (claim,) = answers(policies({"default": (0.8, 100)}), COST)
    assert claim.where == "float32, sample"


def test_undecided_calls_count_for_no_agreement() -> None:
    probes = list(trace(calls=300, probability=0.25))
    (claim,) = answers(probes, COST)
    reusing = {p.prompt for p in probes if p.arm == "default" and p.chunk_hit_tokens >= 256}
    decided = {p.prompt for p in probes if p.top1_probability >= 0.5} & reusing
    assert "agreement on decided calls" in claim.where
    assert claim.n == len(decided)
    assert claim.n < len(reusing)
    (none,) = answers(policies({"default": (0.8, 600)}, probability=0.1), COST)
    assert (none.verdict, none.n) == (Verdict.OPEN, 0)
    assert none.text == "The model is decided on no call, so agreement says nothing."
