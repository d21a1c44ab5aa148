"""Token ids as arrays, and how far two arrays agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_pic.core import token_loops

Tokens = npt.NDArray[np.int32]
"""Token ids: int32, one-dimensional, contiguous, little-endian."""

TOKEN_BYTES = 4

MEDIA_FROM = 1 << 30
"""Ids from here on are media, which have no text; a vocabulary's own are smaller."""


def as_tokens(ids: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """The ids as the core wants them; no copy if they are already so."""
    return np.ascontiguousarray(ids, dtype="<i4")


def hold_media(tokens: Tokens) -> bool:
    """Whether any of `tokens` is media."""
    return bool((tokens >= MEDIA_FROM).any())


def require_tokens(tokens: Tokens) -> None:
    """Refuse arrays of another layout than those of `as_tokens`: their hashes would never match.

    Raises:
        ValueError: the array is not 1-D contiguous int32.
    """
    if tokens.dtype != np.dtype("<i4") or tokens.ndim != 1 or not tokens.flags.c_contiguous:
        raise ValueError(
            f"tokens: {tokens.dtype} of shape {tokens.shape}: must be 1-D contiguous int32; use as_tokens."
        )


def common_len(left: Tokens, right: Tokens) -> int:
    """How many leading tokens are equal. Cost O(result)."""
    return token_loops.equal_from(left, 0, right, 0, min(len(left), len(right)))


def common_suffix_len(left: Tokens, right: Tokens) -> int:
    """How many trailing tokens are equal. Cost O(result)."""
    return token_loops.equal_before(left, len(left), right, len(right), min(len(left), len(right)))
