"""The overhead with nothing to reuse: what the measured turns become."""

from __future__ import annotations

from pathlib import Path

import pytest
from pic_bench.compare.command import with_servers
from pic_bench.idle_overhead import IdleOverhead, Start, Turn, parse, summarize
from pic_bench.report.stats import bootstrap_medians

from sglang_pic.errors import BenchError

_STOCK = [Turn([1.0, 2.0, 3.0], 3.0, 4.0), Turn([2.0, 2.0, 2.0], 3.0, 4.0)]


def _summary(pic: list[Turn], pic_first: list[Turn] | None = None) -> IdleOverhead:
    args = parse(["--model", "m", "--pairs", "2", "--sessions", "3"])
    starts = [Start(first="stock", stock=_STOCK, pic=pic), Start(first="pic", stock=_STOCK, pic=pic_first or pic)]
    return summarize(args, starts, {"stock": [], "pic": []})


def test_equal_turns_are_within_the_target() -> None:
    result = _summary(_STOCK)
    assert (result.ratios.ttft.value, result.ratios.rate.value, result.within_target) == (1.0, 1.0, True)


@pytest.mark.parametrize(
    ("ttft", "elapsed", "ttft_ratio", "rate_ratio"),
    [(2.04, 3.0, 1.02, 1.0), (2.0, 3.06, 1.0, 1 / 1.02)],
    ids=["a slower first token", "fewer requests per second"],
)
def test_either_loss_misses_the_target(ttft: float, elapsed: float, ttft_ratio: float, rate_ratio: float) -> None:
    result = _summary([Turn([1.0, ttft, 9.0], elapsed, 4.4)] * 2)
    assert result.ratios.ttft.value == pytest.approx(ttft_ratio)
    assert result.ratios.rate.value == pytest.approx(rate_ratio)
    assert result.ratios.cpu.value == pytest.approx(1.1)
    assert not result.within_target


def test_what_only_the_order_of_start_makes_cancels_out() -> None:
    """The server that starts second takes a twentieth longer, whichever it is."""
    result = _summary([Turn([2.1], 3.15, 4.0)] * 2, [Turn([2.0 / 1.05], 3.0 / 1.05, 4.0)] * 2)
    assert result.by_first["stock"].ttft.value == pytest.approx(1.05)
    assert result.by_first["pic"].ttft.value == pytest.approx(1 / 1.05)
    assert result.ratios.ttft.value == pytest.approx(1.0)


def test_an_interval_covers_what_differs_from_start_to_start() -> None:
    """Twenty equal pairs say nothing of the next start; starts of one order are not mixed with those of the other."""
    steady = bootstrap_medians([[[1.1] * 20, [1.1] * 20], [[0.9] * 20, [0.9] * 20]])
    assert steady.low == steady.high == pytest.approx((1.1 * 0.9) ** 0.5)
    differing = bootstrap_medians([[[1.0] * 20, [1.1] * 20]])
    assert (differing.low, differing.high) == pytest.approx((1.0, 1.1))
    spread = bootstrap_medians([[[1.0, 1.0, 1.2, 1.2, 1.1]]])
    assert (spread.low, spread.value, spread.high) == pytest.approx((1.0, 1.1, 1.2))


def test_a_number_that_is_too_small_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--repeats", "0"])
    assert "must be 2 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (BenchError("the server ended"), 1, "name: the server ended\n"),
        (KeyboardInterrupt(), 130, "interrupted; servers stopped\n"),
    ],
    ids=["an error", "an interruption"],
)
def test_how_a_program_with_servers_ends(
    capsys: pytest.CaptureFixture[str], raised: BaseException, code: int, said: str
) -> None:
    folders = []

    def body(scratch: Path) -> int:
        folders.append(scratch)
        raise raised

    assert with_servers("name", body) == code
    assert capsys.readouterr().err == said
    assert not folders[0].exists()
