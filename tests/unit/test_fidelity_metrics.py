"""The arithmetic of a measured request, against hand-computed values and slow references; scores of answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from pic_bench.fidelity import metrics


def test_log_softmax_is_that_of_the_definition_also_for_large_logits() -> None:
    rows = np.array([[0.0, math.log(3.0)], [1000.0, 1000.0]], dtype=np.float32)
    np.testing.assert_allclose(np.exp(metrics.log_softmax(rows)), [[0.25, 0.75], [0.5, 0.5]], rtol=1e-7)


def test_divergence_by_hand_and_in_the_right_direction() -> None:
    p, q = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    forward = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    backward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert metrics.divergence(p, q)[0] == pytest.approx(forward, rel=1e-12)
    assert metrics.divergence(q, p)[0] == pytest.approx(backward, rel=1e-12)
    assert metrics.divergence(p, p)[0] == 0.0


def test_divergence_sees_differences_far_below_those_of_float32_servers() -> None:
    """The floor of a float32 run is near 1e-11; a metric in float32 would show noise of 1e-7 in its place."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 50_000)).astype(np.float32) * 4
    other = logits + rng.normal(size=logits.shape).astype(np.float32) * np.float32(1e-5)
    p, q = metrics.log_softmax(logits), metrics.log_softmax(other)
    slow = [
        math.fsum(math.exp(a) * (a - b) for a, b in zip(*rows, strict=True))
        for rows in zip(p.tolist(), q.tolist(), strict=True)
    ]
    np.testing.assert_allclose(metrics.divergence(p, q, np.exp(p)), slow, rtol=1e-3)
    assert 1e-12 < metrics.divergence(p, q).max() < 1e-9


def test_cosine_does_not_see_a_constant() -> None:
    a = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    assert metrics.centred_cosine(a, a + 100) == pytest.approx(1.0)
    assert metrics.centred_cosine(a, a[::-1]) == pytest.approx(-1.0)
    assert metrics.centred_cosine(a, np.array([1.0, 3.0, 2.0], dtype=np.float32)) == pytest.approx(0.5)


def test_nll_reads_each_row_at_its_own_token() -> None:
    rows = np.log([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    assert metrics.mean_nll(rows, [1, 2]) == pytest.approx(-(math.log(0.25) + math.log(0.8)) / 2)


def test_answers_are_compared_as_squad_compares_them() -> None:
    assert metrics.normalise(" The  Quick, brown-fox! ") == "quick brownfox"
    assert metrics.word_f1("red house", "big red house") == pytest.approx(0.8)
    assert metrics.word_f1("red red", "red") == pytest.approx(2 / 3), "a word counts as often as it is in both"
    assert metrics.word_f1("red red", "red red blue") == pytest.approx(0.8)
    assert metrics.word_f1("", "") == 1.0
    assert metrics.word_f1("blue", "red") == 0.0


def test_the_best_gold_answer_counts_and_the_first_line_only() -> None:
    score = metrics.score_answer("\nExeter College.\nAnd more words", ["Oxford", "the Exeter College"], contains=False)
    assert score == (1.0, True)
    partly = metrics.score_answer("at Exeter College", ["Exeter College"], contains=False)
    assert partly.value == pytest.approx(0.8)
    assert not partly.exact


@pytest.mark.parametrize(("answer", "score"), [("It is 1078, I think", 1.0), ("It is 10781", 0.0), ("", 0.0)])
def test_retrieval_asks_for_the_whole_value(answer: str, score: float) -> None:
    assert metrics.score_answer(answer, ["1078"], contains=True) == (score, False)
