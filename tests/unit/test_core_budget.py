"""What one tenant can publish must not make the plans of others in its namespace slow, whatever it does with fields.

Work that a plan counts is no proof that it is bounded, so the lines of Python are counted that a plan executes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from sglang_pic.core import ContentIndex, CoreConfig, DropReason, Lexicon, Path, Plan, Tokens, as_tokens
from sglang_pic.core.alignment import MAX_ALIGNED_FIELDS
from sglang_pic.core.invariants import check

WORDS, NUMBERS, LETTERS = (400, 8_000), (0, 100), (110, 300)


def _texts() -> list[str]:
    rng = np.random.default_rng(5)
    words = [" " + "".join(chr(97 + letter) for letter in rng.integers(0, 26, 5)) for _ in range(*WORDS)]
    letters = [chr(97 + i % 26) + chr(97 + i % 7) for i in range(*LETTERS)]
    return [*(str(i % 10) for i in range(*NUMBERS)), *["\n"] * 10, *letters, *[" "] * 100, *words]


LEXICON = Lexicon(_texts())


def text(seed: int, length: int, ids: tuple[int, int] = WORDS) -> Tokens:
    return as_tokens(np.random.default_rng(seed).integers(*ids, length))


def join(*parts: Tokens) -> Tokens:
    return np.concatenate(parts)


def publish(index: ContentIndex, tokens: Tokens) -> None:
    index.publish("a", tokens, [(0, len(tokens))])


def many_nodes(index: ContentIndex) -> Tokens:
    """One conversation in as many nodes as it had turns, of which a prompt has pieces."""
    path = text(0, 12_000)
    publish(index, path)
    for end in range(11_990, 0, -10):
        index.publish("a", path[:end], [])
    return join(text(2, 60), *(join(path[at : at + 100], text(at, 3)) for at in range(11_000, 3_000, -160)))


def nodes_of_one_token(index: ContentIndex) -> Tokens:
    """A text that repeats itself, with a branch at every token."""
    path = np.resize(text(0, 900), 4_000)
    publish(index, path)
    for at in range(3_999, 0, -1):
        index.publish("a", join(path[:at], text(at, 1)), [])
    return join(text(2, 60), *(join(path[at:900], text(at, 1)) for at in range(0, 800, 40)))


def many_generations(index: ContentIndex) -> Tokens:
    """Requests that spliced at every place of one path."""
    path = text(0, 8_000)
    publish(index, path)
    for i in range(1_200):
        index.publish("a", path, [], generations=[(i * 6, 1 + i % 2), (i * 6 + 3, 1)])
    return join(text(2, 60), *(join(path[at : at + 100], text(at, 3)) for at in range(7_500, 100, -150)))


def fields_in_every_line(index: ContentIndex, num_lines: int = 450) -> Tokens:
    """A log, behind another one that has other stamps."""
    lines = [text(i, 150) for i in range(num_lines)]

    def log(seed: int) -> Tokens:
        return join(text(99_999, 60), *(join(text(seed + i, 2), line) for i, line in enumerate(lines)))

    publish(index, log(10_000))
    return log(50_000)


def fields_of_two_words(index: ContentIndex) -> Tokens:
    """Long fields of the same two tokens in another order, equal in countless ways."""
    lines = [text(i, 90) for i in range(60)]

    def log(seed: int) -> Tokens:
        return join(text(99_999, 60), *(join(text(seed + i, 120, (500, 502)), line) for i, line in enumerate(lines)))

    for seed in (10_000, 20_000, 30_000):
        publish(index, log(seed))
    return log(50_000)


def fields_of_one_long_word(index: ContentIndex) -> Tokens:
    """A hundred tokens without a space between them."""
    lines = [text(i, 150) for i in range(60)]

    def log(seed: int) -> Tokens:
        return join(text(99_999, 60), *(join(text(seed + i, 100, LETTERS), line) for i, line in enumerate(lines)))

    publish(index, log(10_000))
    return log(50_000)


def numbers_behind_numbers(index: ContentIndex) -> Tokens:
    """Values that are numbers, before a text in which every token may begin one."""
    lines = [text(i, 150) for i in range(100)]

    def log(seed: int) -> Tokens:
        return join(text(99_999, 60), *(join(text(seed + i, 12, NUMBERS), line) for i, line in enumerate(lines)))

    publish(index, log(10_000))
    return join(log(50_000), text(77, 20_000, NUMBERS))


def near_donors(index: ContentIndex) -> Tokens:
    """Hundreds of texts that differ from each other in one place, and a prompt that differs from all of them."""
    base = text(0, 1_000)
    for i in range(200):
        publish(index, join(base[: 50 + 2 * i], text(1_000 + i, 2), base[52 + 2 * i :]))
    parts = []
    for i in range(10):
        part = base.copy()
        part[::97] = text(7_000 + i, len(part[::97]))
        parts.append(part)
    return join(text(9, 40), base, *parts)


ATTACKS: dict[Callable[[ContentIndex], Tokens], int] = {
    many_nodes: 20,
    nodes_of_one_token: 50,
    many_generations: 10,
    fields_in_every_line: 30,
    fields_of_two_words: 40,
    fields_of_one_long_word: 40,
    numbers_behind_numbers: 18,
    near_donors: 75,
}
"""With the lines that a plan may execute for each token of the prompt; a quarter less is needed."""


def plan_of(index: ContentIndex, prompt: Tokens) -> Plan:
    def resolve(path: Path, end: int) -> int:
        return end

    plan = index.plan("a", prompt, prefix_len=0, resolve=resolve)
    for run in plan.runs:
        donor = run.donor.tokens(run.donor_end)[run.donor_start :]
        assert np.array_equal(donor, prompt[run.target_start : run.target_end])
    return plan


def lines_executed(call: Callable[[], object]) -> int:
    """How many lines of Python a call executes, its callees' and each turn of a comprehension with them."""
    num_lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_lines


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_plan_is_linear_work_whatever_was_published(attack: Callable[[ContentIndex], Tokens]) -> None:
    index = ContentIndex(CoreConfig(), lexicon=LEXICON)
    prompt = attack(index)
    num_lines = lines_executed(lambda: plan_of(index, prompt))
    assert num_lines <= ATTACKS[attack] * len(prompt) + 100_000
    assert num_lines <= 6 * index.stats().num_work + 100_000, "nothing is done that is not counted"
    check(index)


def test_what_is_given_up_is_computed_and_counted() -> None:
    """Runs behind more changed fields than are looked at would be spliced with old conclusions in them."""
    index = ContentIndex(CoreConfig(), lexicon=LEXICON)
    prompt = fields_in_every_line(index)
    plan = plan_of(index, prompt)
    assert plan.dropped[DropReason.BUDGET] > 10
    last = max(run.target_start for run in plan.runs)
    num_before = (last - 60) // 152
    assert num_before <= len(plan.changed_fields) <= MAX_ALIGNED_FIELDS, "every field before a run is known"
    assert last < len(prompt) / 2


def test_a_short_log_is_not_given_up() -> None:
    index = ContentIndex(CoreConfig(), lexicon=LEXICON)
    plan = plan_of(index, fields_in_every_line(index, 30))
    assert len(plan.changed_fields) >= 25
    assert DropReason.BUDGET not in plan.dropped


def test_generations_of_one_path_are_as_few_as_tell_them_all() -> None:
    """Steps that an earlier one implies are not kept, and what is kept says the same at each position."""
    index = ContentIndex(CoreConfig())
    path = text(0, 400)
    publish(index, path)
    rng = np.random.default_rng(1)
    told: list[tuple[int, int]] = []
    for _ in range(300):
        steps = [(int(rng.integers(0, 400)), int(rng.integers(0, 4))) for _ in range(3)]
        index.publish("a", path, [], generations=steps)
        told += steps
    check(index)
    (node,) = index._ages.values()
    assert len(node.generations) <= 3
    for end in range(401):
        assert node.generation(end) == max((number for start, number in told if start < end), default=0)
