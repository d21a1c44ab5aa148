"""The table of `pic_bench.speculation` counts what its records say."""

from __future__ import annotations

from pic_bench.serving import Answer
from pic_bench.speculation import SetupResult, accept_length, table


def answer(*tokens: int, verified: int = 0, spliced: int = 0) -> Answer:
    """Of a prompt of 100 tokens."""
    return Answer(
        ids=list(tokens), prompt_tokens=100, cached_tokens=spliced, spliced_tokens=spliced, num_verified=verified
    )


def test_answers_and_guesses_are_counted_prompt_by_prompt() -> None:
    result = SetupResult(
        model="m",
        flags="--speculative-algorithm X",
        stock=[answer(1, 2, 3, 4, 5), answer(1, 2, 3, 4, 5)],
        stock_draft=[answer(1, 2, 3, 4, 5, verified=2), answer(1, 2, 3, 4, 6, verified=4)],
        pic=[answer(1, 2, 3, 4, 7), answer(1, 2, 3, 4, 5)],
        pic_draft=[answer(1, 2, 3, 4, 7, verified=4, spliced=50), answer(1, 2, 3, 4, 5, verified=4)],
        shift_zero=[answer(1, 2, 3, 4, 5, verified=2), answer(1, 2, 3, 4, 6, verified=2)],
    )
    (row,) = table([result]).rows
    assert row[2:] == ["2", "1 of 2", "2 of 2", "25.0 %", "1.333", "1.000", "2.000", "1 of 2"]
    assert accept_length(result.stock_draft) == 8 / 6
