"""The overhead with nothing to reuse: which turns are sent and count, and what they become."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pic_bench.idle_overhead import HEADLINE, STUDY, IdleOverhead, Side, Start, Turn, summarize, take_turns
from pic_bench.serving import FirstToken

from sglang_pic.errors import BenchError

ARGS = STUDY.parser.parse_args(["--model", "m"])


def turns(ttft_s: Sequence[float], elapsed_s: float = 3.0, cpu_s: float = 4.0, cached: int = 0) -> list[Turn]:
    """Of three clients each."""
    return [Turn([0.5, each, 9.0], elapsed_s, cpu_s, (cached,) * 3) for each in ttft_s]


def alternating(auto: list[Turn]) -> IdleOverhead:
    start = Start(arm="off+auto", turns={"off": turns([2.0] * len(auto)), "auto": auto})
    return summarize(ARGS, [start], len(auto))


def test_modes_take_turns_and_every_other_pair_is_the_other_way_round() -> None:
    asked: list[tuple[str, int]] = []

    def side(mode: str) -> Side:
        def ask(prompt: list[int]) -> FirstToken:
            asked.append((mode, prompt[0]))
            return FirstToken(0.1 * len(asked), len(prompt), prompt[0])

        return Side(mode, ask, lambda: 7.0 * len(asked))

    taken = take_turns([side("off"), side("auto")], [[[1]], [[2]], [[3]]])
    assert asked == [("off", 1), ("auto", 1), ("auto", 2), ("off", 2), ("off", 3), ("auto", 3)]
    assert [turn.cached_tokens for turn in taken["auto"]] == [(1,), (2,), (3,)]
    assert [turn.ttft_s[0] for turn in taken["off"]] == pytest.approx([0.1, 0.4, 0.5])
    assert {turn.cpu_s for turn in taken["auto"]} == {7.0}


@pytest.mark.parametrize(
    ("auto", "ttft", "rate", "cpu", "within"),
    [
        (turns([2.0, 2.0]), 1.0, 1.0, 1.0, True),
        (turns([2.04, 2.04], cpu_s=4.4), 1.02, 1.0, 1.1, False),
        (turns([2.0, 2.0], elapsed_s=3.06), 1.0, 1 / 1.02, 1.0, False),
    ],
    ids=["equal turns", "a slower first token", "fewer requests per second"],
)
def test_either_loss_misses_the_target(auto: list[Turn], ttft: float, rate: float, cpu: float, within: bool) -> None:
    result = alternating(auto)
    (found,) = result.comparisons
    assert found.name == HEADLINE
    assert (found.ttft.value, found.rate.value, found.cpu.value) == pytest.approx((ttft, rate, cpu))
    assert result.within_target is within


def test_a_call_of_which_some_server_found_more_counts_for_none() -> None:
    result = alternating([*turns([2.0]), *turns([0.1], cached=500), *turns([2.2])])
    assert result.counted == [0, 2]
    assert result.comparisons[0].ttft.value == pytest.approx(1.05)
    with pytest.raises(BenchError, match="nothing counts"):
        alternating(turns([0.1], cached=500))


def test_the_luck_of_a_start_is_told_from_what_a_mode_costs() -> None:
    """Servers that start second in a round are a tenth slower; `auto` costs a hundredth."""
    starts = []
    for number in range(4):
        lucky, unlucky = turns([2.0, 2.0]), turns([2.2, 2.2])
        first, second = ("off", "auto") if number % 2 == 0 else ("auto", "off")
        starts += [Start(arm=first, round=number, turns={first: lucky})]
        starts += [Start(arm=second, round=number, turns={second: unlucky})]
        both = {"off": turns([2.0, 2.0]), "auto": turns([2.02, 2.02])}
        starts += [Start(arm="off+auto", round=number, turns=both)]
    found = {each.name: each for each in summarize(ARGS, starts, 2).comparisons}
    one, between = found[HEADLINE].ttft, found["auto / off, between starts"].ttft
    assert (one.low, one.value, one.high, one.n) == pytest.approx((1.01, 1.01, 1.01, 4))
    assert found["auto / off, between starts"].ttft_by_start == pytest.approx([1.1, 1 / 1.1] * 2)
    assert between.low == pytest.approx(1 / 1.1)
    assert between.high == pytest.approx(1.1)
    assert found["off / off, start to start"].ttft_by_start == pytest.approx([1.1, 1 / 1.1, 1.1])
