"""The old values of changed fields, found again on the donor's path."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_pic.census.changes import changed_fields
from sglang_pic.core import Context, Path, Plan, Run, as_tokens

HEAD, MIDDLE, BODY = list(range(100, 150)), list(range(200, 240)), list(range(300, 400))


NOTHING = as_tokens([])


def plan_of(donor: list[int], prompt: list[int], fields: list[tuple[int, int]]) -> Plan:
    """A run over `BODY`, which ends both."""
    shift = len(prompt) - len(donor)
    run = Run(
        target_start=len(prompt) - 60,
        target_end=len(prompt) - 1,
        donor_start=len(prompt) - 60 - shift,
        donor=Path("a", [as_tokens(donor)]),
        seam_len=0,
        context=Context.CHANGED,
    )
    return Plan(prefix_len=50, end=len(prompt), runs=(run,), changed_fields=tuple(fields))


@pytest.mark.parametrize("old", [[1], [1, 2, 3, 4], []])
@pytest.mark.parametrize("new", [[9], [9, 8], []])
def test_the_old_value_stands_between_the_same_flanks(old: list[int], new: list[int]) -> None:
    start, end = len(HEAD), len(HEAD) + len(new)
    prompt = HEAD + new + BODY
    (found,) = changed_fields(plan_of(HEAD + old + BODY, prompt, [(start, end)]), as_tokens(prompt), NOTHING)
    assert (found.start, found.end, found.old.tolist()) == (start, end, old)


def test_of_several_fields_each_has_its_own() -> None:
    prompt = [*HEAD, 9, *MIDDLE, 8, 8, 8, *BODY]
    plan = plan_of([*HEAD, 1, 1, *MIDDLE, 2, *BODY], prompt, [(50, 51), (91, 94)])
    assert [field.old.tolist() for field in changed_fields(plan, as_tokens(prompt), NOTHING)] == [[1, 1], [2]]


def test_of_equal_flanks_the_nearest_count() -> None:
    """Rows of a table look alike."""
    row = list(range(10, 30))
    prompt = [*HEAD, 5, *row, 6, *row, 9, *row, *BODY]
    donor = [*HEAD, 5, *row, 6, *row, 7, *row, *BODY]
    at = prompt.index(9)
    (found,) = changed_fields(plan_of(donor, prompt, [(at, at + 1)]), as_tokens(prompt), NOTHING)
    assert found.old.tolist() == [7]


def test_where_no_run_is_left_the_earlier_path_is_looked_at() -> None:
    prompt = [*HEAD, 9, *BODY]
    plan = Plan(prefix_len=50, end=len(prompt), changed_fields=((50, 51),))
    (found,) = changed_fields(plan, as_tokens(prompt), as_tokens([1, 2, *BODY]))
    assert found.old.tolist() == [1, 2]


def test_a_value_that_is_not_found_is_left_open() -> None:
    prompt = [*HEAD, 9, *BODY]
    (found,) = changed_fields(plan_of([*MIDDLE, 1, *MIDDLE, *BODY], prompt, [(50, 51)]), as_tokens(prompt), NOTHING)
    assert found.old.tolist() == []
    assert found.old.dtype == np.int32
