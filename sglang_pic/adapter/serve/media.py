"""The core's tokens of a request, and what a server without images knows of media: nothing.

`features/images.py` has the servers that move images; elsewhere requests with media are computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sglang_pic.adapter.sglang.seams import Req
from sglang_pic.core import Run, Span, Tokens, as_tokens


class Media(NamedTuple):
    """The images of one prompt, in order."""

    spans: tuple[Span, ...]
    """Where they are."""
    firsts: tuple[int, ...]
    """Their first core tokens; the others follow one by one."""

    def over(self, tokens: Tokens) -> Tokens:
        """The core's tokens of the beginning of the prompt, from SGLang's in int32, which are changed in place."""
        for (start, end), first in zip(self.spans, self.firsts, strict=True):
            tokens[start:end] = np.arange(first, first + len(tokens[start:end]), dtype=tokens.dtype)
        return tokens


class TextOnly:
    """A server that moves no images."""

    def read(self, req: Req) -> Media | None:
        """The images of a request that brings media; `None` where its prompt cannot be served."""
        return None

    def ids(self, tokens: Tokens) -> array[int]:
        """SGLang's ids of a path of core tokens."""
        return array("q", tokens.astype(np.int64).tobytes())

    def turns(self, runs: Sequence[Run], tokens: Tokens) -> list[int | None]:
        """By how many positions the keys of each run turn; `None` for its shift."""
        return [None for _ in runs]


def tokens_of(req: Req, end: int | None = None) -> Tokens:
    """The core's tokens of what is to be prefilled of a request, or of the first `end` of it."""
    tokens, media = as_tokens(req.full_untruncated_fill_ids[:end]), req.pic.media
    return tokens if media is None else media.over(tokens)
