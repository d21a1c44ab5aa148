"""A short soak: nothing lost, leaked, stale or different, and the checkers find what is made wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from pic_bench.soak.__main__ import Soak, main

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("quick_servers")]


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["hicache", "hicache-pd"])
def test_a_short_soak_is_clean(setup: str, model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """`make soak` has minutes for the same; bench/results/soak.json is half an hour of it."""
    # A machine that comes to little in so many seconds is given more.
    for seconds in (15, 60, 240):
        out = tmp_path / f"soak-{seconds}.json"
        flags = ("--seconds", str(seconds), "--seed", "3", "--quiet", "--out", str(out), "--logs", str(tmp_path))
        models = model_dir("tiny-gqa").parent
        code = main(["--setups", setup, "--models", str(models), *flags])
        found = msgspec.json.decode(out.read_bytes(), type=Soak)
        assert (found.mismatches, found.leaks, found.stale_rows, found.failures) == (0, 0, 0, 0), found.what
        assert code == 0
        if is_eventful(found):
            break
    assert is_eventful(found), "it says nothing unless there was something to go wrong"
    # Donors that are unlocked before their rows are copied are found, and so is the answer to another prompt.
    assert (found.control is None) == (found.page_size > 1)
    if found.control is None:
        return
    assert found.control.stale_rows > 0
    assert found.control.mismatches == found.control.num_mismatches


def is_eventful(found: Soak) -> bool:
    """Whether all happened that a soak is for."""
    counts = (found.retractions, found.flushes, found.compared, found.spliced_rows_checked, found.fetched_rows_checked)
    return (
        {"abort", "disconnect", "invalid"} <= set(found.faults)
        and found.outcomes["answered"] > 20
        and found.evicted_tokens > 2 * found.pool_tokens
        and all(count > 0 for count in counts)
    )
