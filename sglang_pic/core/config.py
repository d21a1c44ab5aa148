"""The settings of the pure core: the reuse policy, how text is cut into chunks, and how large the index may grow."""

from __future__ import annotations

from typing import Annotated, Final

from sglang_pic.core.policy import ReusePolicy
from sglang_pic.core.settings import Range, check, refuse, settings_of

__all__ = ["MOST_REUSE", "CoreConfig"]

# The FastCDC package refuses averages below 256 bytes and minima below 64 bytes; see chunker.py for how smaller
# chunks are cut with it.
_AVG_CHOICES = (16, 32, 64, 128, 256, 512)


class CoreConfig(ReusePolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reuse policy of a server and the settings of its chunk index."""

    # Every window of 64 tokens is to hold a whole chunk, however it lies. A minimum of 8 makes every chunk long enough
    # to be looked up.
    chunk_min_tokens: int = 8
    """Shortest chunk."""
    chunk_avg_tokens: int = 16
    """Average chunk (16, 32, 64, 128, 256 or 512); smaller finds more and costs memory."""
    chunk_max_tokens: int = 64
    """Longest chunk."""
    max_index_tokens: Annotated[int, Range(1, 1 << 40)] = 8_000_000
    """Most tokens in the chunk index, about 16 bytes each; texts that begin alike share them."""
    max_index_bytes: Annotated[int, Range(1 << 16, 1 << 44)] = 256 << 20
    """Most host memory of the chunk index, in bytes."""
    max_donors_per_chunk: Annotated[int, Range(1, 64)] = 4
    """Donors kept of equal chunks."""

    def __post_init__(self) -> None:
        check(self)
        average = self.chunk_avg_tokens
        if average not in _AVG_CHOICES:
            refuse(self, "chunk_avg_tokens", f"one of {', '.join(map(str, _AVG_CHOICES))}")
        for name, bounds in (
            ("chunk_min_tokens", Range(min(16, average // 4), average)),
            ("chunk_max_tokens", Range(4 * min(64, average), 1 << 20)),
        ):
            setting = settings_of(CoreConfig)[name]._replace(range=bounds)
            if not setting.allows(getattr(self, name)):
                refuse(self, name, setting.allowed)


MOST_REUSE: Final = CoreConfig(seam_tokens=1, min_spliced_tokens=8, tail_tokens=0)
"""Splices whatever is equal, wherever it lies, but for one token of each run: the most that can be recovered, at a
lower fidelity than the defaults have."""
