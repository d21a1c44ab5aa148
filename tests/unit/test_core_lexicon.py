"""Words in token ids: found however they are written and cut into tokens, and not inside longer ones."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.core import Lexicon, Tokens, as_tokens

TEXTS = [" alpha", "alpha", "Alpha", " al", "pha", " the", "18", *'":, .\n1827s_']
LEXICON = Lexicon(TEXTS)


def cut(text: str) -> Tokens:
    """The text in tokens, the longest first."""
    found = re.findall("|".join(sorted(map(re.escape, TEXTS), key=len, reverse=True)), text)
    assert "".join(found) == text
    return as_tokens([TEXTS.index(piece) for piece in found])


@pytest.mark.parametrize(
    ("word", "text", "num_places"),
    [
        ("alpha", "alpha alpha\nAlpha", 3),
        ("alpha", '"alpha":alpha', 2),
        ("alpha", "alphas", 0),
        ("alpha", "salpha", 0),
        ("18:27", " 18:27.", 1),
        ("18:27", "18:271", 0),
        ("18:27", "18:2 7", 0),
        ("18", "18 18:27 118 181 18.", 2),
        ("7", "1,7 7,", 1),
        ("8", "1.8", 0),
        ("alpha_18", " alpha_18\n", 1),
    ],
)
def test_a_word_is_found_as_it_stands_in_the_text(word: str, text: str, num_places: int) -> None:
    assert len(LEXICON.find([word], cut(text))[word]) == num_places


@given(st.lists(st.integers(0, len(TEXTS) - 1), max_size=40).map(as_tokens))
def test_places_agree_with_a_search_of_the_text(tokens: Tokens) -> None:
    text = LEXICON.text(tokens).casefold()
    (places,) = LEXICON.find(["alpha"], tokens).values()
    assert len(places) == len(re.findall(r"(?<![^\W_])alpha(?![^\W_])", text))


def test_words_of_a_span_are_whole() -> None:
    tokens = cut("the\n".replace("the", " the") + '"alpha_18:27", alpha')
    at = tokens.tolist().index(TEXTS.index("18"))
    assert list(LEXICON.words(tokens, at, at + 1)) == ["alpha_18:27"]
    at = tokens.tolist().index(TEXTS.index("alpha"))
    assert list(LEXICON.words(tokens, at, at + 1)) == ["alpha_18:27", "alpha"]
    assert LEXICON.words(tokens, at, at) == {}


def test_a_word_is_found_in_other_tokens_and_unknown_ids_have_no_text() -> None:
    split = as_tokens([TEXTS.index(" al"), TEXTS.index("pha")])
    assert LEXICON.find(["alpha"], split) == {"alpha": [0]}
    tokens = as_tokens([1, 10_000, 1])
    assert LEXICON.text(tokens) == "alphaalpha"
    assert LEXICON.find(["alpha"], as_tokens([10_000, 1])) == {"alpha": [1]}


def test_a_vocabulary_may_grow() -> None:
    lexicon = Lexicon()
    assert lexicon.find(["beta"], as_tokens([0, 1])) == {"beta": []}
    lexicon.extend([" beta", "\n"])
    assert lexicon.find(["beta"], as_tokens([0, 1])) == {"beta": [0]}
    assert lexicon.line_end(as_tokens([0, 1, 0]), 0, 3) == 1
