"""The overhead with nothing to reuse: what the measured turns become."""

from __future__ import annotations

import pytest
from pic_bench.idle_overhead import IdleOverhead, Turn, parse, summarize

_STOCK = [Turn([1.0, 2.0, 3.0], 3.0), Turn([2.0, 2.0, 2.0], 3.0)]


def _summary(pic: list[Turn]) -> IdleOverhead:
    args = parse(["--model", "m", "--pairs", "2", "--sessions", "3"])
    return summarize(args, _STOCK, pic, {"stock": [], "pic": []})


def test_equal_turns_are_within_the_target() -> None:
    result = _summary(_STOCK)
    assert (result.ttft_ratio.value, result.rate_ratio.value, result.within_target) == (1.0, 1.0, True)


@pytest.mark.parametrize(
    ("ttft", "elapsed", "ttft_ratio", "rate_ratio"),
    [(2.04, 3.0, 1.02, 1.0), (2.0, 3.06, 1.0, 1 / 1.02)],
    ids=["a slower first token", "fewer requests per second"],
)
def test_either_loss_misses_the_target(ttft: float, elapsed: float, ttft_ratio: float, rate_ratio: float) -> None:
    result = _summary([Turn([1.0, ttft, 9.0], elapsed)] * 2)
    assert result.ttft_ratio.value == pytest.approx(ttft_ratio)
    assert result.rate_ratio.value == pytest.approx(rate_ratio)
    assert not result.within_target


def test_a_number_that_is_too_small_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--sessions", "0"])
    assert "must be 2 or more" in capsys.readouterr().err
