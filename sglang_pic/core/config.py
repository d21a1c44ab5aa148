"""The settings of the pure core: how prompts are cut, what counts as a run, how large the index may grow.

Owns the bounds and the messages of every core setting. Knows nothing of SGLang's flags.
"""

from __future__ import annotations

from typing import Final

import msgspec

from sglang_pic.errors import ConfigError

__all__ = ["MOST_REUSE", "NEAR_TAILS", "CoreConfig"]

NEAR_TAILS: Final = 4
"""So many tails from a prompt's end a donor must know the better part of what stands before its rows there."""

# The FastCDC package refuses averages below 256 bytes and minima below 64 bytes; see chunker.py for how smaller
# chunks are cut with it.
_AVG_CHOICES = (16, 32, 64, 128, 256, 512)


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the chunk index and the planner; all lengths are in tokens."""

    # Every window of 64 tokens is to hold a whole chunk, however it lies: the sweep over random and recorded text is in
    # the design notes. A minimum of 8 makes every chunk long enough to be looked up.
    chunk_min_tokens: int = 8
    chunk_avg_tokens: int = 16
    chunk_max_tokens: int = 64
    sink_tokens: int = 32
    seam_tokens: int = 32
    # Equal tokens that make a run worth its gap. At least 97 in 100 of what repeats in windows of 64 can be recovered
    # on every recorded set; shorter runs bring little more and cost agreement (design notes).
    min_run_tokens: int = 64
    # So many of them must be left to splice. What lay between two donors' runs is a donor too, in pieces: a text put
    # together from many contexts answers worse than one that is computed once and then taken whole.
    min_spliced_tokens: int = 64
    # Tokens at the prompt's end, which the answer hangs on most. Rows are spliced there only if they were computed
    # behind nearly what they follow here: at most `foreign_tokens` that do not stand there, and all of it but
    # `unseen_percent`; in the last `NEAR_TAILS` times as many, all of it but 40 percent.
    tail_tokens: int = 256
    foreign_tokens: int = 8
    unseen_percent: int = 10
    # Tokens of stored paths. Counted once however many paths share them.
    max_index_tokens: int = 8_000_000
    # Everything the index keeps, as estimated by `IndexStats.num_bytes`.
    max_index_bytes: int = 256 << 20
    max_donors_per_chunk: int = 4

    def __post_init__(self) -> None:
        if self.chunk_avg_tokens not in _AVG_CHOICES:
            allowed = ", ".join(map(str, _AVG_CHOICES))
            raise ConfigError(f"chunk_avg_tokens={self.chunk_avg_tokens!r}: must be one of {allowed}; use 16.")
        _check("chunk_min_tokens", self.chunk_min_tokens, min(16, self.chunk_avg_tokens // 4), self.chunk_avg_tokens)
        _check("chunk_max_tokens", self.chunk_max_tokens, 4 * min(64, self.chunk_avg_tokens), 1 << 20)
        _check("sink_tokens", self.sink_tokens, 0, 1 << 20)
        _check("seam_tokens", self.seam_tokens, 0, 1 << 16)
        _check("min_run_tokens", self.min_run_tokens, 1, 1 << 20)
        _check("min_spliced_tokens", self.min_spliced_tokens, 1, 1 << 20)
        _check("tail_tokens", self.tail_tokens, 0, 1 << 20)
        _check("foreign_tokens", self.foreign_tokens, 0, 1 << 20)
        _check("unseen_percent", self.unseen_percent, 0, 100)
        _check("max_index_tokens", self.max_index_tokens, 1, 1 << 40)
        _check("max_index_bytes", self.max_index_bytes, 1 << 16, 1 << 44)
        _check("max_donors_per_chunk", self.max_donors_per_chunk, 1, 64)


def _check(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        default = CoreConfig.__struct_defaults__[CoreConfig.__struct_fields__.index(name)]
        raise ConfigError(f"{name}={value!r}: must be an integer from {low} to {high}; the default is {default}.")


MOST_REUSE: Final = CoreConfig(seam_tokens=1, min_spliced_tokens=8, tail_tokens=0)
"""Whatever is equal is spliced, wherever it lies, but for one token of each run: the most that can be recovered, at a
lower fidelity than the defaults have (README, "Does it answer the same?")."""
