"""Random requests that repeat text at other places, for a scheduler of `rank_driver`."""

from __future__ import annotations

import random
from typing import Any

BREAK, NEWLINE, COLON = 0, 1, 2
FIRST_WORD, NUM_WORDS = 3, 600
# Names whose order in a set depends on the process's seed for hashes.
KEYS = (None, None, None, None, "one", "two")


class Traffic:
    """The same random requests on every rank, by a seed: sessions that repeat text at other places, behind fields."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.documents = [self._lines(self.rng.randrange(100, 400)) for _ in range(16)]
        # Text of a short period has a donor at every shift.
        self.documents += [self._lines(3) * 12, [*self._lines(20)] * 6]
        self.fields = [self.rng.sample(range(FIRST_WORD, FIRST_WORD + NUM_WORDS), 2) for _ in range(6)]
        self.history: list[list[int]] = []

    def prompt(self) -> list[int]:
        rng = self.rng
        if self.history and rng.random() < 0.3:
            earlier = rng.choice(self.history)
            return earlier[: rng.randrange(1, len(earlier) + 1)] + self._lines(rng.randrange(5, 60))
        tokens: list[int] = []
        for label, name in rng.sample(self.fields, 3):
            tokens += [
                label,
                COLON,
                name if rng.random() < 0.5 else rng.randrange(FIRST_WORD, FIRST_WORD + 40),
                NEWLINE,
            ]
        for document in rng.sample(self.documents, rng.randrange(1, 6)):
            start = rng.choice((0, 0, rng.randrange(len(document))))
            tokens += [BREAK, *document[start:]]
        tokens += [BREAK, *self._lines(rng.randrange(4, 40))]
        self.history = [*self.history[-40:], tokens]
        return tokens

    def options(self) -> dict[str, Any]:
        rng, pic = self.rng, dict[str, Any]()
        draw = rng.random()
        if draw < 0.08:
            pic["mode"] = "off"
        elif draw < 0.3:
            pic["edit"] = rng.choice(("in_place", "recompile", "notes"))
        if rng.random() < 0.1:
            pic["skills"] = "near"
        if rng.random() < 0.08:
            pic["pin"] = f"pin-{rng.randrange(6)}"
        elif rng.random() < 0.05:
            pic["unpin"] = f"pin-{rng.randrange(6)}"
        return pic

    def fields_of_request(self) -> dict[str, Any]:
        """What else of a request decides."""
        rng = self.rng
        fields: dict[str, Any] = {"extra_key": rng.choice(KEYS), "cache_salt": rng.choice((None, None, None, "salt"))}
        if rng.random() < 0.05:
            fields |= {"return_logprob": True, "logprob_start_len": rng.randrange(200)}
        return fields

    def _lines(self, length: int) -> list[int]:
        words = [self.rng.randrange(FIRST_WORD, FIRST_WORD + NUM_WORDS) for _ in range(length)]
        words[11::12] = [NEWLINE] * len(words[11::12])
        return words
