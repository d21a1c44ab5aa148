"""Images in prompts as the way of a request sees them: a server that moves none, which `features/images.py` extends."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sglang_pic.adapter.sglang.seams import Req
from sglang_pic.core import Run, Span, Tokens


class Media(NamedTuple):
    """The images of one prompt, in order."""

    spans: tuple[Span, ...]
    """Their positions."""
    firsts: tuple[int, ...]
    """Their first core tokens; the others count up from there."""
    lags: tuple[int, ...]
    """Place less position, before the first image and after each; see `features/images.py`."""

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

    def shifts(self, runs: Sequence[Run], media: Media | None) -> list[int]:
        """The positions by which the keys of each run of a prompt with these images are rotated."""
        return [run.shift for run in runs]
