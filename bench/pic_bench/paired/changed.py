"""Arms behind a changed field, whose place is known: what of the text behind it is computed again.

text-end     from the field to the end of its paragraph
named        and the lines that have a word of the old or of the new value
pieces-N     and in a second pass the N paragraphs whose best token the question attends to most
drawn-N      the same with paragraphs that seed N draws, until no fewer tokens are computed
window-N     instead of all that: so many tokens behind the field
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from pic_bench.fidelity.cases.text import ModelText
from pic_bench.paired.arms import SEEDS, Arm, Block, without
from sglang_pic.core import Tokens, as_tokens, common_len
from sglang_pic.core.tokens import common_suffix_len

TAIL_TOKENS = 32
WINDOWS = (128, 256)
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
    words = {*_words(text, old[start : len(old) - (len(new) - end)]), *_words(text, new[start:end])}
    named = [
        at for first, last in _lines(text, ids) if words & {*_words(text, new[first:last])} for at in range(first, last)
    ]
    computed = {"text-end": {*home, *tail}, "named": {*home, *named, *tail}}
    computed |= {f"window-{num}": {*range(start, end + num), *tail} for num in WINDOWS}
    arms = [Arm(name=name, blocks=_blocks(spliced, each)) for name, each in computed.items()]
    rest = _blocks(spliced, computed["named"])
    # A piece that is partly computed is computed whole.
    whole = [part for first, last in pieces for part in _blocks(spliced, {*range(first)} | {*range(last, len(ids))})]
    whole = [piece for piece in whole if any(piece.start < part.end and part.start < piece.end for part in rest)]
    if len(whole) < 2:
        return arms
    seed = number % SEEDS
    arms += [Arm(name=f"pieces-{num}", blocks=rest, whole=whole, attended=num) for num in (1, 2)]
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
