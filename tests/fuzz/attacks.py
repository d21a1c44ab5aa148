"""What a hostile tenant publishes, and the prompt that is then planned in its namespace.

`tests/core/test_budget.py` bounds the work of these plans; `python -m tests.fuzz.attacks` times them, larger.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from sglang_pic.core import ContentIndex, CoreConfig, Lexicon, RowSource, Tokens, as_tokens
from tests.helpers.core_builders import join, publish_rows

WORDS, NUMBERS, LETTERS = (400, 8_000), (0, 100), (110, 300)


def _texts() -> list[str]:
    rng = np.random.default_rng(5)
    words = [" " + "".join(chr(97 + letter) for letter in rng.integers(0, 26, 5)) for _ in range(*WORDS)]
    letters = [chr(97 + i % 26) + chr(97 + i % 7) for i in range(*LETTERS)]
    return [*(str(i % 10) for i in range(*NUMBERS)), *["\n"] * 10, *letters, *[" "] * 100, *words]


LEXICON = Lexicon(_texts())


def text(seed: int, length: int, ids: tuple[int, int] = WORDS) -> Tokens:
    return as_tokens(np.random.default_rng(seed).integers(*ids, length))


def log(seed: int, lines: list[Tokens], field_len: int, ids: tuple[int, int] = WORDS) -> Tokens:
    """Lines behind a header, each with a field of its own in front."""
    fields = (join(text(seed + i, field_len, ids), line) for i, line in enumerate(lines))
    return join(text(99_999, 60), *fields)


def publish(index: ContentIndex, tokens: Tokens) -> None:
    publish_rows(index, "a", tokens, [(0, len(tokens))])


def many_nodes(index: ContentIndex, scale: int = 1) -> Tokens:
    """One conversation in as many nodes as it had turns, of which a prompt has pieces."""
    path = text(0, 12_000 * scale)
    publish(index, path)
    for end in range(12_000 * scale - 10, 0, -10):
        publish_rows(index, "a", path[:end], [])
    return join(text(2, 60), *(join(path[at : at + 100], text(at, 3)) for at in range(11_000 * scale, 3_000, -160)))


def nodes_of_one_token(index: ContentIndex, scale: int = 1) -> Tokens:
    """A text that repeats itself, with a branch at every token."""
    path = np.resize(text(0, 900), 4_000 * scale)
    publish(index, path)
    for at in range(4_000 * scale - 1, 0, -1):
        publish_rows(index, "a", join(path[:at], text(at, 1)), [])
    return join(text(2, 60), *(join(path[at:900], text(at, 1)) for at in range(0, 800, 40 // scale)))


def many_generations(index: ContentIndex, scale: int = 1) -> Tokens:
    """Requests that spliced at every place of one path."""
    path = text(0, 8_000 * scale)
    publish(index, path)
    for i in range(1_200 * scale):
        publish_rows(index, "a", path, [], generations=[(i * 6, 1 + i % 2), (i * 6 + 3, 1)])
    return join(text(2, 60), *(join(path[at : at + 100], text(at, 3)) for at in range(7_500 * scale, 100, -150)))


def fields_in_every_line(index: ContentIndex, scale: int = 1, num_lines: int = 450) -> Tokens:
    """A log, behind another one that has other stamps."""
    lines = [text(i, 150) for i in range(num_lines * scale)]
    publish(index, log(10_000, lines, 2))
    return log(50_000, lines, 2)


def fields_of_two_words(index: ContentIndex, scale: int = 1) -> Tokens:
    """Long fields of the same two tokens in another order, equal in countless ways."""
    lines = [text(i, 90) for i in range(60 * scale)]
    for seed in (10_000, 20_000, 30_000):
        publish(index, log(seed, lines, 120, (500, 502)))
    return log(50_000, lines, 120, (500, 502))


def fields_of_one_long_word(index: ContentIndex, scale: int = 1) -> Tokens:
    """A hundred tokens without a space between them."""
    lines = [text(i, 150) for i in range(60 * scale)]
    publish(index, log(10_000, lines, 100, LETTERS))
    return log(50_000, lines, 100, LETTERS)


def numbers_behind_numbers(index: ContentIndex, scale: int = 1) -> Tokens:
    """Values that are numbers, before a text in which every token may begin one."""
    lines = [text(i, 150) for i in range(100 * scale)]
    publish(index, log(10_000, lines, 12, NUMBERS))
    return join(log(50_000, lines, 12, NUMBERS), text(77, 20_000 * scale, NUMBERS))


def near_donors(index: ContentIndex, scale: int = 1) -> Tokens:
    """Hundreds of texts that differ from each other in one place, and a prompt that differs from all of them."""
    base = text(0, 1_000)
    for i in range(100 + 100 * scale):
        publish(index, join(base[: 50 + 2 * i], text(1_000 + i, 2), base[52 + 2 * i :]))
    parts = []
    for i in range(10 * scale):
        part = base.copy()
        part[::97] = text(7_000 + i, len(part[::97]))
        parts.append(part)
    return join(text(9, 40), base, *parts)


def repeated_chunk(index: ContentIndex, scale: int = 1) -> Tokens:
    """Thousands of donors with the same chunk, and a prompt of nothing else."""
    message = text(0, 40)
    for i in range(1_000 * scale):
        publish(index, join(text(10 + i, 70), message, text(50_000 + i, 30)))
    return np.resize(join(message, text(3, 3)), 10_000 * scale)


def one_token(index: ContentIndex, scale: int = 1) -> Tokens:
    """One token, over and over."""
    publish(index, join(text(1, 50), as_tokens(np.full(20_000 * scale, 777))))
    return join(text(2, 70), as_tokens(np.full(20_000 * scale, 777)), text(3, 9))


def many_endings(index: ContentIndex, scale: int = 1) -> Tokens:
    """Chunks of one ending, as many as a list holds, and a prompt in which one may end everywhere."""
    ending = text(0, 8)
    for i in range(100):
        publish(index, join(text(1 + i, 60 + i % 7), ending))
    return np.resize(ending, 20_000 * scale)


ATTACKS: dict[Callable[..., Tokens], int] = {
    many_nodes: 20,
    nodes_of_one_token: 50,
    many_generations: 10,
    fields_in_every_line: 30,
    fields_of_two_words: 40,
    fields_of_one_long_word: 40,
    numbers_behind_numbers: 18,
    near_donors: 80,
    repeated_chunk: 50,
    one_token: 50,
    many_endings: 75,
}
"""With the lines that a plan may execute for each token of the prompt; a quarter less is needed."""


def main(scale: int = 4) -> None:
    """Print how long each plan takes."""
    for attack in ATTACKS:
        index = ContentIndex(CoreConfig(), lexicon=LEXICON)
        prompt = attack(index, scale)
        begun = time.process_time()
        plan = index.plan("a", prompt, prefix_len=0, rows=RowSource())
        took_ms = 1000 * (time.process_time() - begun)
        per_token = 1000 * took_ms / len(prompt)
        print(f"{attack.__name__:26} {len(prompt):8,} tokens {took_ms:7.0f} ms {per_token:6.2f} us a token", end=" ")
        print(f"{plan.num_spliced:8,} spliced", flush=True)


if __name__ == "__main__":
    main()
