"""The settings of the pure core: the reuse policy, how text is cut into chunks, and how large the index may grow."""

from __future__ import annotations

from typing import Annotated, Final

from sglang_pic.core.policy import ReusePolicy
from sglang_pic.core.settings import Choice, Integers, check, refuse, setting

__all__ = ["MOST_REUSE", "CoreConfig"]


class CoreConfig(ReusePolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reuse policy of a server and the settings of its chunk index; lengths are in tokens."""

    # A minimum of 8 makes every chunk long enough to be looked up.
    chunk_min_tokens: Annotated[int, setting(Integers(4, 512), "Shortest chunk.")] = 8
    # The FastCDC package refuses averages below 256 bytes and minima below 64 bytes; chunker.py says how smaller chunks
    # are cut with it. With 16 every window of 64 tokens holds a whole chunk, however the window lies.
    chunk_avg_tokens: Annotated[
        int, setting(Choice((16, 32, 64, 128, 256, 512)), "Average chunk; smaller finds more and costs memory.")
    ] = 16
    chunk_max_tokens: Annotated[int, setting(Integers(64, 1 << 20), "Longest chunk.")] = 64
    max_index_tokens: Annotated[
        int,
        setting(
            Integers(1, 1 << 40), "Most tokens of stored paths, about 16 bytes each; paths that begin alike share them."
        ),
    ] = 8_000_000
    max_index_bytes: Annotated[
        int, setting(Integers(1 << 16, 1 << 44), "Most host memory of the chunk index, in bytes, as estimated.")
    ] = 256 << 20
    max_donors_per_chunk: Annotated[int, setting(Integers(1, 64), "Donors kept of equal chunks.")] = 4

    def __post_init__(self) -> None:
        check(self)
        average = self.chunk_avg_tokens
        for name, allowed in (
            ("chunk_min_tokens", Integers(min(16, average // 4), average)),
            ("chunk_max_tokens", Integers(4 * min(64, average), 1 << 20)),
        ):
            if not allowed.holds(getattr(self, name)):
                refuse(self, name, allowed)


MOST_REUSE: Final = CoreConfig(seam_tokens=1, min_spliced_tokens=8, tail_tokens=0)
"""Splices whatever is equal, wherever it lies, but for one token of each run: the most that can be recovered, at a
lower fidelity than the defaults have."""
