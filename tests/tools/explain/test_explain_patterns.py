"""What harnesses do to prompts, after public bug reports: each pattern is named, and all it loses is counted."""

from __future__ import annotations

from collections import Counter

import pytest

from sglang_pic.core import CoreConfig
from sglang_pic.explain.cause import Cause
from tests.helpers.explain_fakes import breaks, serve
from tests.helpers.explain_patterns import (
    PATTERNS,
)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_named_and_all_that_it_loses_is_counted(name: str) -> None:
    make, cause = PATTERNS[name]
    lost, num_spliced = Counter[Cause](), 0
    for outcome, found in breaks(serve(make(), CoreConfig())):
        if found is not None:
            lost[found.cause] += found.num_lost
            num_spliced += found.num_spliced
            assert found.num_spliced <= found.num_lost <= found.num_behind
        else:
            assert not outcome.num_repeated, "what repeats has a cause"
    assert lost.most_common(1)[0][0] is cause
    assert lost[cause] >= 0.8 * lost.total() > 0
    assert "In the harness" in cause.advice
