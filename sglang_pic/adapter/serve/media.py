"""The core's tokens of a request, with media; `TextOnly` is for servers that do not move images (`features/images`)."""

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
    """Their positions."""
    firsts: tuple[int, ...]
    """Their first core tokens; the others count up from there."""

    def over(self, tokens: Tokens) -> Tokens:
        """Replace the images' ids in the first tokens of the prompt by core tokens, in place; returns `tokens`."""
        for (start, end), first in zip(self.spans, self.firsts, strict=True):
            tokens[start:end] = np.arange(first, first + len(tokens[start:end]), dtype=tokens.dtype)
        return tokens


class TextOnly:
    """A server that moves no images: requests with media are computed."""

    def read(self, req: Req) -> Media | None:
        """The images of a request with media; `None` if it cannot be spliced."""
        return None

    def ids(self, tokens: Tokens) -> array[int]:
        """SGLang's ids of a path of core tokens."""
        return array("q", tokens.astype(np.int64).tobytes())

    def shifts(self, runs: Sequence[Run], tokens: Tokens) -> list[int]:
        """The positions by which each run's keys are rotated."""
        return [run.shift for run in runs]


def tokens_of(req: Req, end: int | None = None) -> Tokens:
    """The core's tokens of a request's prefill, or the first `end` of them."""
    tokens, media = as_tokens(req.full_untruncated_fill_ids[:end]), req.pic.media
    return tokens if media is None else media.over(tokens)
