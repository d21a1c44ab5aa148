"""The matrix in REFERENCE.md: its outcomes are of tests that exist, and no entry claims to run without one."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the matrix reads the kernels' pools")
from pic_bench.pages import outcomes

from sglang_pic.adapter.sglang.contract import BUILT_FOR
from sglang_pic.adapter.support import SUPPORT, Area, Level
from tests.conftest import ROOT
from tests.e2e.matrix import features_of, function_of

RECORDED = outcomes.read()


def test_tests_are_recorded_with_the_features_that_they_are_marked_with(request: pytest.FixtureRequest) -> None:
    """Every test of this run; `make test` runs them all."""
    marked = {function_of(item.nodeid): features_of(item) for item in request.session.items}
    recorded = {name: RECORDED.tests[name].features if name in RECORDED.tests else [] for name in marked}
    assert recorded == marked, "run `make matrix`"


def test_recorded_tests_exist_and_passed() -> None:
    for name, test in RECORDED.tests.items():
        path, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(), name
        assert test.outcome == "passed", name
    assert RECORDED.sglang == BUILT_FOR


def test_what_is_shown_is_in_the_matrix_and_no_feature_is_claimed_without_a_test() -> None:
    """Whether it works, falls back or is refused; of what is only admitted nothing is claimed."""
    shown = {feature for test in RECORDED.tests.values() for feature in test.features}
    assert shown <= {entry.what for entry in SUPPORT}
    claimed = [entry.what for entry in SUPPORT if entry.area is Area.FEATURE and entry.level is not Level.ADMITTED]
    assert [what for what in claimed if what not in shown] == []
