"""What a call looks like to a model: token ids, and where its messages and its text lie in them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pic_traces.session import Call

__all__ = ["EncodedCall", "Encoder", "Part", "Tokens"]

Tokens = npt.NDArray[np.int32]
"""Token ids: one-dimensional, contiguous, little-endian int32."""


class Part(NamedTuple):
    """Tokens `[start, end)` of a prompt, which belong to one message, with the template's own tokens around it."""

    start: int
    end: int
    role: str
    """The message's role; `template` for what belongs to no message (a default system prompt, a generation prompt)."""


class EncodedCall(Protocol):
    """One call as token ids."""

    @property
    def tokens(self) -> Tokens:
        """The prompt, as the server would prefill it."""

    @property
    def path(self) -> Tokens:
        """The prompt and the recorded answer: what a prefix cache holds when the call has ended."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The messages of the prompt in order; they tile it."""

    def text(self, start: int, end: int) -> str:
        """The text of `path[start:end]`; a character cut by `start` or `end` belongs to the token it begins in."""


class Encoder(Protocol):
    """Turns calls into token ids, the same call always into the same ids.

    Args:
        name: what the ids are of, for reports: the tokenizer's folder, or what stands in for one.
        is_exact: whether these are the ids of a model's own tokenizer and template, not an approximation.
        delimiters: ids of the tokens that open or close a message.
    """

    name: str
    is_exact: bool
    delimiters: frozenset[int]

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the calls so far is not as a server would have it, for reports; empty where all is."""

    def encode(self, call: Call) -> EncodedCall:
        """The ids of one call.

        Raises:
            TraceError: the template refuses the messages; the error names session and call.
        """
