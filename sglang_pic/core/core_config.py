"""The settings of the pure core: the reuse policy, how text is cut into chunks, and how large the index may grow."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from sglang_pic.core.policy import PRESETS, ReusePolicy
from sglang_pic.settings import Range, check


class CoreConfig(ReusePolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reuse policy of a server and the settings of its chunk index."""

    # Small enough for every window of 64 tokens to contain a whole chunk. Chunks of 8 tokens and more can be looked
    # up. FastCDC refuses other averages; chunker.py says how averages below 64 are cut.
    chunk_min_tokens: Annotated[int, "Shortest chunk."] = 8
    chunk_avg_tokens: Annotated[
        Literal[16, 32, 64, 128, 256, 512], "Average chunk; smaller finds more and costs memory."
    ] = 16
    chunk_max_tokens: Annotated[int, "Longest chunk."] = 64
    max_index_tokens: Annotated[
        int,
        Range(1, 1 << 40),
        "Most tokens in the chunk index, about 16 bytes each; texts with a common prefix share them.",
    ] = 8_000_000
    max_index_bytes: Annotated[int, Range(1 << 16, 1 << 44), "Most host memory of the chunk index, in bytes."] = (
        256 << 20
    )
    max_donors_per_chunk: Annotated[int, Range(1, 64), "Donors kept of equal chunks."] = 4

    def __post_init__(self) -> None:
        average = self.chunk_avg_tokens
        check(
            self,
            chunk_min_tokens=Range(min(16, average // 4), average),
            chunk_max_tokens=Range(4 * min(64, average), 1 << 20),
        )


MOST_REUSE: Final = CoreConfig(**PRESETS["most"])
"""Splices all equal text but one token of each run: the upper bound of reuse, at a lower fidelity than the defaults."""
