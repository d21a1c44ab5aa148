"""Token ids as arrays, and how far two arrays agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_pic.core.native import compiled

Tokens = npt.NDArray[np.int32]
"""Token ids: int32, one-dimensional, contiguous, little-endian."""

TOKEN_BYTES = 4

MEDIA_FROM = 1 << 30
"""From here on ids stand for media, which have no text; a vocabulary's own are smaller."""

_FIRST_BLOCK = 64
_TRUE = b"\x01"


def as_tokens(ids: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """The ids as the core wants them; no copy if they are already so."""
    return np.ascontiguousarray(ids, dtype="<i4")


def hold_media(tokens: Tokens) -> bool:
    """Whether any of `tokens` stands for media."""
    return bool((tokens >= MEDIA_FROM).any())


def require_tokens(tokens: Tokens) -> None:
    """Refuse arrays whose bytes are not those of `as_tokens`: their keys would never match."""
    if tokens.dtype != np.dtype("<i4") or tokens.ndim != 1 or not tokens.flags.c_contiguous:
        raise ValueError(
            f"tokens: {tokens.dtype} of shape {tokens.shape}: must be 1-D contiguous int32; use as_tokens."
        )


@compiled
def common_len(left: Tokens, right: Tokens) -> int:
    """How many leading tokens are equal. Cost O(result), not O(length): blocks of growing size are compared."""
    limit = min(len(left), len(right))
    at, block = 0, _FIRST_BLOCK
    while at < limit:
        stop = min(at + block, limit)
        # `bytes.find` is several times faster than numpy's `argmax` on so few.
        first = (left[at:stop] != right[at:stop]).tobytes().find(_TRUE)
        if first >= 0:
            return at + first
        at = stop
        block *= 4
    return limit


@compiled
def common_suffix_len(left: Tokens, right: Tokens) -> int:
    """How many trailing tokens are equal. Cost O(result)."""
    limit = min(len(left), len(right))
    # The two need not be equally long. Reversed views would do for `common_len`, at three times the time.
    left, right = left[len(left) - limit :], right[len(right) - limit :]
    at, block = limit, _FIRST_BLOCK
    while at > 0:
        start = max(0, at - block)
        last = (left[start:at] != right[start:at]).tobytes().rfind(_TRUE)
        if last >= 0:
            return limit - start - last - 1
        at = start
        block *= 4
    return limit


@compiled
def equal_around(left: Tokens, right: Tokens, middle: int) -> tuple[int, int]:
    """The last place before `middle` where two arrays of one length differ, and the first from it on; -1 for none."""
    equal = (left == right).tobytes()
    return equal.rfind(b"\0", 0, middle), equal.find(b"\0", middle)
