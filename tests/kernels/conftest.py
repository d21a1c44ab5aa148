"""The implementations that a test of the ops runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.splice_cases import TARGETS, Target


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Every implementation in turn, taken by the ops while the test runs."""
    with request.param.active():
        yield request.param
