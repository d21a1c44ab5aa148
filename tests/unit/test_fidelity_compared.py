"""What is counted, what an interval says, and the check of CI; `test_kept_runs` has the figures of real records."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from fidelity_records import probe, recorded
from pic_bench.fidelity.arms import Arm
from pic_bench.fidelity.cases.case import Case
from pic_bench.fidelity.compared import check_naive, make_cells, make_panels
from pic_bench.fidelity.measure import Reference, compare
from pic_bench.fidelity.record import Donors, Experiment, Probe
from pic_bench.fidelity.summary import Cell, Thresholds
from pic_bench.fidelity.tables import cell_table
from pic_bench.report.stats import Statistic, bootstrap


def cell_of(probes: Sequence[Probe]) -> Cell:
    """The only cell of these records."""
    (found,) = make_cells(make_panels(probes, Thresholds())[0], Thresholds())
    return found


def test_flips_are_counted_where_the_full_prefill_is_sure() -> None:
    """Likeliest tokens of four forced positions; at the third the full prefill hesitates."""
    text: Any = SimpleNamespace(text=str)
    case = Case(experiment=Experiment.GRID, name="p0", source="s", prompt=[1] * 9, gold=[1, 2, 3, 4])
    full, this = (recorded(positions=5, vocab=8) for _ in range(2))
    for at, (one, other) in enumerate([(1, 1), (2, 5), (3, 6), (4, 4)]):
        full.logits[at, one] = 9.0 if at != 2 else 2.0
        this.logits[at, other] = 9.0
    found = compare(Reference(full), this, Arm(name="seam-1", donors=Donors.ISOLATED), case, "float32", text)
    assert (found.sure_tokens, found.sure_flips, found.forced_agreement) == (3, 1, 0.5)
    again = msgspec.structs.replace(found, prompt="p1", sure_tokens=5, sure_flips=0)
    table = cell_table([cell_of([found, again])])
    row = dict(zip(table.header, table.rows[0], strict=True))
    assert (row["forced top-1"][:6], row["sure tokens flipped"]) == ("50.0 %", "12.5 % of 8")
    assert cell_of([probe(), probe(prompt="p1", sure_tokens=5, sure_flips=0)]).sure is None


DRAWS = np.array(list(itertools.product(range(5), repeat=5)))
"""Every one of the 3,125 equally likely resamples of five things."""


@pytest.mark.parametrize("statistic", list(Statistic))
@pytest.mark.parametrize("most", [1, 3], ids=lambda most: f"up to {most} values a unit")
def test_intervals_are_those_of_all_draws_of_units(statistic: Statistic, most: int) -> None:
    """The bounds over all 3,125 draws of five units, each with all that it holds."""
    rng = random.Random(5)
    units = [unit for unit in range(5) for _ in range(1 + unit % most)]
    values = [unit + rng.random() for unit in units]
    of_unit = [[value for value, unit in zip(values, units, strict=True) if unit == number] for number in range(5)]
    of = np.mean if statistic is Statistic.MEAN else np.median
    estimate = bootstrap(values, units, statistic=statistic)
    assert (estimate.value, estimate.n) == (pytest.approx(float(of(values))), len(units))
    resampled = [of([value for i in draw for value in of_unit[i]]) for draw in DRAWS]
    low, high = np.percentile(resampled, [2.5, 97.5])
    # 2,000 drawn resamples give bounds within a tenth of the width over all.
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=(high - low) / 10)
    if most == 1:
        alone = bootstrap(values, statistic=statistic)
        assert (alone.low, alone.value, alone.high) == pytest.approx((estimate.low, estimate.value, estimate.high))


def two_arms(
    first: Callable[[int], float], second: Callable[[int], float], prompts: int = 30, **fields: object
) -> list[Probe]:
    """The unrotated and the rotated arm, KL by number of the prompt."""
    kls = {"naive": first, "seam-1": second}
    return [
        probe(arm=arm, prompt=f"p{i}", kl=kl(i), forced_kl=kl(i), **fields)
        for arm, kl in kls.items()
        for i in range(prompts)
    ]


def test_the_check_holds_only_where_the_naive_arm_is_worse_beyond_chance() -> None:
    (checked,) = check_naive(two_arms(lambda i: 0.5 + i / 100, lambda i: 0.01 * i, 10))
    assert checked.holds
    assert (checked.difference.n, checked.difference.value) == (10, pytest.approx(0.5))
    assert str(checked).startswith("check holds: float32: mean KL without rotation less with it 0.5 [")
    assert not check_naive(two_arms(lambda i: i % 2, lambda i: (i + 1) % 2, 10))[0].holds
    (lucky,) = check_naive(two_arms(lambda i: (i + 1) % 2, lambda i: i % 2, 11))
    assert lucky.difference.value > 0
    assert not lucky.holds
    (alone,) = check_naive([probe(arm="naive", forced_kl=1.0)])
    assert not alone.holds, "nothing to pair is no pass"
    assert str(alone) == "check FAILS: float32: no prompt has both arms"
    assert check_naive([]) == []
