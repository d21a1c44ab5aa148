"""The soak's requests are the same for a seed, and its judge tells rounding from another answer."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from pic_bench.environment import capture_environment
from pic_bench.soak.__main__ import Control, Soak
from pic_bench.soak.judge import TOLERANCE, difference
from pic_bench.soak.load import Fault, requests, sessions
from pic_bench.soak.patient import Memory
from pic_traces.encode import load_encoder

TOP = ({1: -0.5, 2: -0.5001, 3: -4.0}, {4: -0.1, 5: -3.0})


def answer(tokens: list[int], tops: tuple[dict[int, float], ...]) -> dict[str, Any]:
    """As `/generate` has it."""
    places = [[[value, token, None] for token, value in top.items()] for top in tops]
    chosen = [[top.get(token, -9.0), token, None] for token, top in zip(tokens, tops, strict=True)]
    return {"meta_info": {"output_token_logprobs": chosen, "output_top_logprobs": places}}


def shifted(top: dict[int, float], token: int, by: float) -> dict[int, float]:
    return {**top, token: top[token] + by}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (answer([1, 4], TOP), None),
        (answer([1, 4], (shifted(TOP[0], 3, TOLERANCE / 2), TOP[1])), None),
        (answer([2, 9], (TOP[0], {9: -0.1, 8: -1.0})), None),
        (answer([3, 9], (TOP[0], {9: -0.1, 8: -1.0})), "3 instead of 1"),
        (answer([1, 4], (TOP[0], shifted(TOP[1], 5, 2 * TOLERANCE))), "token 1: log-probability of 5"),
        (answer([1, 4], (TOP[0], {4: -0.1, 6: -2.9})), "token 1: log-probability of"),
        (answer([1, 4], (shifted(TOP[0], 3, float("nan")), TOP[1])), "token 0: log-probability of 3"),
        (answer([1], TOP[:1]), "1 tokens, stock has 2"),
    ],
)
def test_rounding_is_told_from_another_answer(found: dict[str, Any], says: str | None) -> None:
    told = difference(answer([1, 4], TOP), found)
    assert (told is None) == (says is None)
    assert (says or "") in (told or "")


def test_a_seed_gives_the_same_requests_and_all_of_their_kinds() -> None:
    drawn, again = (
        [request for number, session in enumerate(played) for request in requests(session, number, 5)]
        for played in (islice(sessions(load_encoder(None), 5), 50) for _ in range(2))
    )
    assert drawn == again
    assert {request.fault for request in drawn} == set(Fault)
    assert any(request.is_compared for request in drawn)
    assert {(request.cache_salt, request.extra_key) for request in drawn} > {(None, None), (None, "key-a")}
    assert all(request.rid.count("-") == 3 for request in drawn)
    assert len({request.rid for request in drawn}) == len(drawn)


def test_a_soak_is_clean_where_nothing_is_wrong_and_the_controls_were_found() -> None:
    fields: dict[str, Any] = dict.fromkeys(Soak.__struct_fields__, 0) | {
        "environment": capture_environment(),
        "memory": Memory(after_warm_up=100.0, at_end=101.0),
        "control": Control(stale_rows=5, mismatches=8, num_mismatches=8),
    }
    assert Soak(**fields).is_clean
    unfound = [Control(stale_rows=n, mismatches=m, num_mismatches=8) for n, m in ((0, 8), (5, 7))]
    wrong = [{name: 1} for name in ("mismatches", "leaks", "stale_rows", "failures")]
    for changed in (*wrong, *({"control": control} for control in unfound)):
        assert not Soak(**{**fields, **changed}).is_clean
