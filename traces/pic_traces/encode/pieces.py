"""A regular-expression splitter that stands in for a BPE tokenizer: pieces of text and stable ids for them.

The ids mean nothing beyond being equal for equal pieces. Prompt tokens of all calls, as
a multiple of SmolLM2's (tools flattened in both): ChatDev 1.04, Claude Code 0.97, mini-swe 1.04, moatless 0.96,
OpenDevin 1.02, tau-bench 1.08 (JSON schemas). English text and code; other scripts take a piece a character.
"""

from __future__ import annotations

import re

import numpy as np
import xxhash

from pic_traces.encode.tokenized import TokenizedText

__all__ = ["NUM_RESERVED", "split_pieces"]

NUM_RESERVED = 16
"""Ids below this are never a piece's."""

_NUM_IDS = 2**31 - NUM_RESERVED
# Longest pieces swept against SmolLM2's tokenizer on six recorded sets, 2026-11; digits in pairs
# stand between tokenizers that take one at a time (SmolLM2) and three.
_PIECE = re.compile(
    r" [A-Z]?[a-z]{1,10}"  # a word begins with its space; more than that of it is cut off
    r"|[A-Z]?[a-z]{1,5}"
    r"| ?[A-Z]{1,2}(?![a-z])"
    r"|[0-9]{1,2}"
    r"| ?[!-/:-@\[-`{-~]{1,2}"
    r"|\s+(?!\S)|\s+"  # whitespace leaves its last space to the word behind it
    r"|.",
    re.DOTALL,
)


def split_pieces(text: str) -> TokenizedText:
    """A text as pieces: words with their leading space, digits in groups, punctuation, runs of whitespace.

    Every character is in one piece, so the pieces joined are the text. O(n).
    """
    pieces = _PIECE.findall(text)
    digest = xxhash.xxh32_intdigest
    ids = np.fromiter((digest(piece.encode("utf-8", "surrogatepass")) for piece in pieces), np.uint64, len(pieces))
    starts = np.zeros(len(pieces), np.int32)
    np.cumsum(np.fromiter(map(len, pieces), np.int32, len(pieces))[:-1], out=starts[1:])
    return TokenizedText(text, (ids % _NUM_IDS + NUM_RESERVED).astype(np.int32), starts)
