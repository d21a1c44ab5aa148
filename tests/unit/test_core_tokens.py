"""Token arrays: what is refused, and how far two of them agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.core import Tokens, as_tokens, common_len
from sglang_pic.core.tokens import common_suffix_len, require_tokens

few = st.lists(st.integers(0, 3), max_size=60).map(as_tokens)
# Longer than the first blocks that are compared.
long = st.tuples(st.integers(0, 1_500), few).map(lambda parts: np.concatenate([np.full(parts[0], 2, "<i4"), parts[1]]))


@given(few | long, few | long)
def test_common_len_and_common_suffix_len(left: Tokens, right: Tokens) -> None:
    shortest = min(len(left), len(right))
    same = common_len(left, right)
    assert left[:same].tolist() == right[:same].tolist()
    assert same == shortest or left[same] != right[same]
    assert common_suffix_len(left[::-1].copy(), right[::-1].copy()) == same


@pytest.mark.parametrize("tokens", [np.zeros(4), np.zeros((2, 2), "<i4"), np.zeros(8, "<i4")[::2], np.zeros(3, "<i8")])
def test_arrays_that_are_not_tokens_are_refused(tokens: np.ndarray) -> None:
    with pytest.raises(ValueError, match="use as_tokens"):
        require_tokens(tokens)
