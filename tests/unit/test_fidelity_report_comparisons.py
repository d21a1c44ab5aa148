"""Pairs of arms are compared by prompt, each prompt once, and what is shown is what the records say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from fidelity_records import grid, probe, questions, shifts, trace
from pic_bench.fidelity.compared import make_comparisons, make_panels
from pic_bench.fidelity.record import Probe
from pic_bench.fidelity.summary import Comparison, Thresholds
from pic_bench.fidelity.tables import comparisons_table

NAIVE = "not rotated less rotated, seam 1"
FIRST = "seam 0 less seam 1"
LONGER = "seam 1 less seam 32"
FLOOR = "seam 1 less exact hit"
DONORS = "donors alone less in context, seam 1"


def compared(probes: Sequence[Probe], what: str) -> list[Comparison]:
    return [one for one in make_comparisons(make_panels(probes, Thresholds())[0]) if one.what == what]


def interval(comparisons: Sequence[Comparison]) -> str:
    """The last column of the only row."""
    (row,) = comparisons_table(comparisons, min_prompts=20).rows
    return row[-1]


def two_arms(
    first: Callable[[int], float], second: Callable[[int], float], prompts: int = 30, **fields: object
) -> list[Probe]:
    """The unrotated and the rotated arm, KL by number of the prompt."""
    kls = {"naive": first, "seam-1": second}
    return [probe(arm=arm, prompt=f"p{i}", kl=kl(i), **fields) for arm, kl in kls.items() for i in range(prompts)]


def test_a_comparison_by_hand() -> None:
    found = compared(two_arms(lambda i: 0.5 + i % 2 / 10, lambda i: 0.01), NAIVE)
    (one,) = found
    assert (one.n, one.num_units, one.where, one.higher) == (30, 30, "float32, grid, alone", 1.0)
    assert (one.first, one.second) == (pytest.approx(0.55), pytest.approx(0.01))
    assert one.difference.value == pytest.approx(0.54)
    (row,) = comparisons_table(found, min_prompts=20).rows
    assert row[:5] == [NAIVE, "float32, grid, alone", "30", ".55", ".010"]
    assert row[5].startswith("+.54 [+.5")
    assert row[6:] == ["100 %", "above 0"]


def test_the_interval_s_side() -> None:
    assert interval(compared(two_arms(lambda i: 0.01, lambda i: 0.5 + i % 2 / 10), NAIVE)) == "below 0"
    assert interval(compared(two_arms(lambda i: 0.1 + (-1) ** i * 0.05, lambda i: 0.1), NAIVE)) == "includes 0"


@pytest.mark.parametrize(("prompts", "side"), [(19, "too few"), (20, "above 0")])
def test_too_few_prompts_are_marked(prompts: int, side: str) -> None:
    assert interval(compared(two_arms(lambda i: 0.5 + i / 100, lambda i: 0.01, prompts), NAIVE)) == side


def test_a_prompt_counts_once_however_many_records_it_has() -> None:
    probes = [p for blocks in (1, 2, 4) for p in two_arms(lambda i: 0.5, lambda i: 0.1, 12, num_blocks=blocks)]
    (one,) = compared(probes, NAIVE)
    assert one.n == 12
    assert interval([one]) == "too few"


def test_texts_of_one_passage_are_no_independent_prompts() -> None:
    (one,) = compared(list(shifts()), NAIVE)
    assert (one.n, one.num_units) == (144, 24)


def test_the_grid_s_comparisons() -> None:
    """The invented records have an effect of the usual direction in each of them, twice: by dtype, and by donors."""
    probes = list(grid())
    for what in (NAIVE, FIRST, LONGER, FLOOR):
        found = compared(probes, what)
        assert all(one.difference.low > 0 for one in found)
        wheres = {f"{d}, grid, {w}" for d in ("float32", "bfloat16") for w in ("alone", "in context")}
        assert {one.where for one in found} == wheres
    assert [one.difference.low > 0 for one in compared(probes, DONORS)] == [True] * 2


def test_questions_and_traces_have_tables_of_their_own() -> None:
    assert make_comparisons(make_panels([*questions(prompts=4), *trace(calls=12)], Thresholds())[0]) == []
