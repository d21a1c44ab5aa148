"""Planted rows: the prompts of attacker and victim, and what is told of the answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.planted import Answer, Attack, Victim, planted, summarize
from pic_bench.report.stats import common_len

from sglang_pic.core import CoreConfig


@pytest.fixture(scope="module")
def text(model_dir: Callable[[str], Path]) -> ModelText:
    return ModelText(model_dir("smollm2"))


@pytest.mark.parametrize("attack", list(Attack))
def test_the_victim_says_nothing_of_what_is_planted(attack: Attack, text: ModelText) -> None:
    for number in range(4):
        made = planted(attack, number, text, 0)
        assert made == planted(attack, number, text, 0)
        assert "Correction" in text.text(made.attacker)
        assert "Correction" not in text.text(made.victim)
        assert made.answers.old != made.answers.new
        # The text and all behind it are the victim's own words.
        shared = common_len(made.attacker[::-1], made.victim[::-1])
        assert shared > 480
        before = common_len(made.attacker, made.victim)
        added = len(made.attacker) - len(made.victim)
        if attack is Attack.TEXT:
            assert before < 40
        else:
            assert before + shared >= len(made.victim) - 2
            core = CoreConfig()
            assert added <= core.max_field_tokens // 4 if attack is Attack.SENTENCE else added > core.max_field_tokens


def answer(log_odds: float, spliced: int = 0) -> Answer:
    return Answer(spliced_tokens=spliced, kl=0.25, is_same_token=log_odds > 0, log_odds=log_odds)


def victim(template: str, moved_to: float) -> Victim:
    return Victim(
        attack="prompt",
        name=template,
        template=template,
        prompt_tokens=100,
        full=answer(2.0),
        attacker=answer(-2.0),
        arms={"default": answer(moved_to, 50), "off": answer(2.0)},
    )


def test_how_far_answers_moved() -> None:
    moved, off = summarize([victim("a", 1.0), victim("b", -1.0)])
    assert (moved.arm, moved.spliced_share, moved.flipped_tokens, moved.turned) == ("default", 0.5, 1, 1)
    assert (moved.preferring_own, moved.could_turn, moved.victims, moved.templates) == (2, 2, 2, 2)
    assert (moved.moved.value, moved.moved.low, moved.moved.high) == (0.5, 0.25, 0.75)
    assert (off.arm, off.moved.value, off.turned) == ("off", 0.0, 0)
