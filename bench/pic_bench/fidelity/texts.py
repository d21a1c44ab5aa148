"""Natural text to cut blocks from: of question sets, of recorded traces, or of the sample that the repository carries.

Owns reading and cutting. It must not know what a block is for.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from pic_traces.source import load

from pic_bench.fidelity.tokens import Document, ModelText
from sglang_pic.errors import BenchError

__all__ = ["TextPool", "trace_texts"]

_MIN_CHARACTERS = 400
_SHARED = 16
"""Two cuts of one prompt must not have this many tokens in a row in common: a run could come from either."""
_ATTEMPTS = 200


def trace_texts(trace: str) -> list[str]:
    """The texts of a trace's messages, each once, in order; short ones are left out.

    Raises:
        TraceError: the trace cannot be read.
    """
    found: dict[str, None] = {}
    for session in load(trace):
        for message in session.pool:
            content = message.get("content")
            if isinstance(content, str) and len(content) >= _MIN_CHARACTERS:
                found[content] = None
    return list(found)


class TextPool:
    """Documents as token ids, from which spans are cut where words begin.

    Raises:
        BenchError: there is no document to cut from.
    """

    def __init__(self, source: str, texts: Iterable[str], model_text: ModelText) -> None:
        self.source = source
        self._documents: list[Document] = [model_text.document(text) for text in texts]

    def cut(self, rng: random.Random, lengths: list[int]) -> list[list[int]]:
        """One span of each length, that share no longer passage; a span of any document is as likely as another.

        Raises:
            BenchError: the text is too short or repeats itself too much.
        """
        used: set[tuple[int, ...]] = set()
        spans = []
        for length in lengths:
            for _ in range(_ATTEMPTS):
                ids = self._span(rng, length)
                grams = _grams(ids)
                if len(grams) == len(ids) - _SHARED + 1 and not grams & used:
                    break
            else:
                raise BenchError(f"{self.source}: too little text for {len(lengths)} passages that share nothing.")
            used |= grams
            spans.append(ids)
        return spans

    def _span(self, rng: random.Random, length: int) -> list[int]:
        fitting = [d for d in self._documents if len(d.ids) >= length and d.word_starts]
        if not fitting:
            raise BenchError(f"{self.source}: no document of {length} tokens or more.")
        (document,) = rng.choices(fitting, weights=[len(d.ids) - length + 1 for d in fitting])
        starts = [at for at in document.word_starts if at + length <= len(document.ids)]
        start = rng.choice(starts) if starts else 0
        return document.ids[start : start + length]


def _grams(ids: list[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[i : i + _SHARED]) for i in range(len(ids) - _SHARED + 1)}
