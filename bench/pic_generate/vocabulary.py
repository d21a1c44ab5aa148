"""Seeded text of a wanted length in tokens, from a fixed list of plain words (data/vocabulary.txt).

Lengths are approximate through `TOKENS_PER_WORD` (prose) and `approximate_tokens` (code, JSON), or exact when a
tokenizer is given.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

DATA = Path(__file__).with_name("data")
"""The words, the tools and the facts of generated text."""

TOKENS_PER_WORD = 1.11
"""Tokens of a generated word with its share of the full stops, by SmolLM2's tokenizer (mean of 100,000 words)."""

CountTokens = Callable[[str], int]

WORDS = tuple((DATA / "vocabulary.txt").read_text("utf8").split())
"""The words that all generated text is made of, in alphabetical order."""

# A line break with its indentation is a token of its own; digits are mostly one token each.
_PIECE = re.compile(r"\n\s*|\d|_|[^\W\d_]+|[^\w\s]+")


def make_text(rng: random.Random, num_tokens: int, count_tokens: CountTokens | None = None) -> str:
    """Random words as sentences, `num_tokens` tokens long; the same `rng` state gives the same text.

    With `count_tokens` the length is exact where whole words can hit it, and never more than `num_tokens`. O(n log n).
    """
    if num_tokens <= 0:
        return ""
    if count_tokens is None:
        return _sentences(rng, max(1, round(num_tokens / TOKENS_PER_WORD)))
    words = _sentences(rng, num_tokens + 1).split(" ")
    num_fit = bisect_right(range(1, len(words) + 1), num_tokens, key=lambda end: count_tokens(" ".join(words[:end])))
    text = " ".join(words[:num_fit])
    # A word of several tokens may not fit where one token is left: a one-token word does.
    while count_tokens(longer := f"{text} go" if text else "Go") <= num_tokens:
        text = longer
    return text


def approximate_tokens(text: str) -> int:
    """About how many tokens code, compact JSON or prose has.

    Within 10 % of SmolLM2's tokenizer for the text of the generators, from 100 tokens on. O(n).
    """
    return len(_PIECE.findall(text))


def load_token_counter(folder: str) -> CountTokens:
    """A counter that uses `tokenizer.json` in `folder` (needs the package `tokenizers`).

    Raises:
        TraceError: the package or the file is missing, or the file cannot be read.
    """
    from pic_traces.encode.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(folder).expanduser())
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _sentences(rng: random.Random, num_words: int) -> str:
    words: list[str] = []
    left = 0
    for _ in range(num_words):
        word = rng.choice(WORDS)
        if left == 0:
            left = rng.randint(6, 14)
            word = word.capitalize()
        left -= 1
        words.append(f"{word}." if left == 0 else word)
    return " ".join(words)
