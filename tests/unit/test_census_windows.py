"""The upper bound of the census, against a set of all windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.census import windows
from sglang_pic.census.windows import WINDOW_LEN, Repeated, WindowSearch

SHORT = 4

# Pieces of a few texts one after the other, so that windows repeat at every alignment and across borders.
CALLS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=14), st.integers(0, 14), st.integers(0, 14)), min_size=1, max_size=15
)


def brute(seen: set[tuple[int, ...]], path: list[int], prompt_len: int, prefix_len: int, size: int) -> Repeated:
    starts = [at for at in range(prompt_len - size + 1) if tuple(path[at : at + size]) in seen]
    seen |= {tuple(path[at : at + size]) for at in range(len(path) - size + 1)}
    tokens, behind = (
        {at for start in some for at in range(start, start + size) if at >= prefix_len}
        for some in (starts, [start for start in starts if start >= prefix_len])
    )
    return Repeated(len(tokens), len(behind))


def shared_len(path: list[int], others: list[list[int]]) -> int:
    return max((n for other in others for n in range(len(path) + 1) if path[:n] == other[:n]), default=0)


@given(calls=CALLS)
def test_it_agrees_with_a_set_of_windows(calls: list[tuple[list[int], int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "WINDOW_LEN", SHORT)
        search, seen = WindowSearch(), set[tuple[int, ...]]()
        earlier: list[list[int]] = []
        for path, prompt_len, prefix_len in calls:
            prompt = min(prompt_len, len(path))
            # What lies before `prefix_len` is to begin an earlier path.
            prefix = min(prefix_len, prompt, shared_len(path, earlier))
            found = search.observe(np.array(path, dtype=np.int32), prompt_len=prompt, prefix_len=prefix)
            assert found == brute(seen, path, prompt, prefix, SHORT)
            earlier.append(path)


def test_memory_is_eight_bytes_a_distinct_window_and_arrays_stay_few() -> None:
    rng = np.random.default_rng(2)
    search = WindowSearch()
    for _ in range(200):
        path = rng.integers(0, 50_000, 500, dtype=np.int32)
        for _ in range(2):
            search.observe(path, prompt_len=len(path), prefix_len=0)
    assert sum(len(seen) for seen in search._seen) == 200 * (500 - WINDOW_LEN + 1)
    assert len(search._seen) <= 10
