"""The text of token ids, learnt from the calls that had them, so that any encoder can be used."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from pic_traces.encode.encoded import EncodedCall, Tokens


@dataclass(slots=True)
class TokenTexts:
    """Texts by token id, for as many ids as the calls use.

    A character of several tokens is learnt with the first of them, so a rare character may be shown as another.
    """

    _texts: dict[int, str] = field(default_factory=dict)

    def learn(self, encoded: EncodedCall, start: int) -> None:
        """Note the texts of the tokens of the path from `start` on: O(new tokens)."""
        ids, places = np.unique(encoded.path[start:], return_index=True)
        for token, place in zip(ids.tolist(), places.tolist(), strict=True):
            if token not in self._texts:
                self._texts[token] = encoded.text(start + place, start + place + 1)

    def decode(self, tokens: Tokens) -> str:
        """The text of ids that were learnt before; an unknown id reads as `\\ufffd`."""
        return "".join(self._texts.get(token, "\ufffd") for token in tokens.tolist())
