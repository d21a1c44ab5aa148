"""Arms with a changed field at a known place: the text after it that is computed again.

text-end     from the field to the end of its paragraph
named        and the lines that have a word of the old or of the new value
pieces-2     and in a second pass the two paragraphs whose best token the question attends to most
drawn-N      the same with paragraphs that seed N draws, until no fewer tokens are computed
window       instead of all that: 128 tokens behind the field
clause       the window, and lines that have a word of the field's own line
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from pic_bench.fidelity.cases.text import ModelText
from pic_bench.paired.arms import SEEDS, Arm, Block, without
from sglang_pic.core import Tokens, as_tokens, common_len
from sglang_pic.core.tokens import common_suffix_len

TAIL_TOKENS = 32
WINDOW_TOKENS = 128
_MOST_LINES = 8
"""That have a word; a more frequent one tells nothing."""
_LONGEST = 160
"""A longer paragraph is cut into pieces."""
_WORD = re.compile(r"[^\W_]{3,}")


def changed_arms(ids: Sequence[int], old: Tokens, spliced: Sequence[Block], text: ModelText, number: int) -> list[Arm]:
    """The arms of one prompt; `spliced` is all that equals the old prompt behind the fields."""
    new = as_tokens(ids)
    start = common_len(old, new)
    end = len(new) - common_suffix_len(old[start:], new[start:])
    pieces = [*_pieces(text, ids)]
    tail = range(len(ids) - TAIL_TOKENS, len(ids))
    home = [at for first, last in pieces if first < end and start < last for at in range(first, last)]
    lines = {span: {*_words(text, new[slice(*span)])} for span in _lines(text, ids)}
    words = {*_words(text, old[start : len(old) - (len(new) - end)]), *_words(text, new[start:end])}
    beside = set[str]().union(*(found for (first, last), found in lines.items() if first < end and start < last))
    times = Counter(word for found in lines.values() for word in found)
    beside = words | {word for word in beside if times[word] <= _MOST_LINES}
    named, clause = (
        [at for span, found in lines.items() if each & found for at in range(*span)] for each in (words, beside)
    )
    window = range(start, end + WINDOW_TOKENS)
    computed = {"text-end": {*home, *tail}, "named": {*home, *named, *tail}}
    computed |= {"window": {*window, *tail}, "clause": {*window, *clause, *tail}}
    arms = [Arm(name=name, blocks=_blocks(spliced, each)) for name, each in computed.items()]
    rest = _blocks(spliced, computed["named"])
    # A piece that is partly computed is computed whole.
    whole = [part for first, last in pieces for part in _blocks(spliced, {*range(first)} | {*range(last, len(ids))})]
    whole = [piece for piece in whole if any(piece.start < part.end and part.start < piece.end for part in rest)]
    if len(whole) < 2:
        return arms
    seed = number % SEEDS
    arms.append(Arm(name="pieces-2", blocks=rest, whole=whole, attended=2))
    drawn = random.Random(f"drawn-{seed}-{number}")
    return [*arms, Arm(name=f"drawn-{seed}", blocks=rest, whole=whole, attended=2, drawn=drawn)]


def _blocks(spliced: Sequence[Block], computed: set[int]) -> list[Block]:
    return [part for block in spliced for part in without(block, computed)]


def _pieces(text: ModelText, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Paragraphs, the long ones in pieces."""
    for start, end in _ended_by(text, ids, "\n\n"):
        num = -(-(end - start) // _LONGEST)
        bounds = np.linspace(start, end, num + 1).astype(int).tolist()
        yield from pairwise(bounds)


def _lines(text: ModelText, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    return _ended_by(text, ids, "\n")


def _ended_by(text: ModelText, ids: Sequence[int], end: str) -> Iterator[tuple[int, int]]:
    start, before = 0, ""
    for at, token in enumerate(ids):
        piece = text.text([token])
        if end in before[-1:] + piece or piece.startswith("<|"):
            yield start, at + 1
            start = at + 1
        before = piece
    if start < len(ids):
        yield start, len(ids)


def _words(text: ModelText, tokens: Tokens) -> list[str]:
    return [word.lower() for word in _WORD.findall(text.text(tokens.tolist()))]
