"""What bolder settings of the server would splice of the same calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pic_traces.encode.encoded import Encoder

from sglang_pic.census.outcome import Outcome
from sglang_pic.census.simulate import Cache
from sglang_pic.census.tally import Tally
from sglang_pic.core import CoreConfig

_MUCH = 0.01
"""A setting that splices this share of all prompt tokens more is worth a line."""


@dataclass(slots=True)
class Bolder:
    """Serves each call from a cache of every setting, too; files have caches of their own.

    Args:
        encoder: made the calls' tokens.
        settings: by the flag that sets them.
    """

    encoder: Encoder
    settings: Mapping[str, CoreConfig]
    _spliced: Counter[str] = field(default_factory=Counter)
    _file: str | None = None
    _caches: dict[str, Cache] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Serve one call; calls must be added in their order."""
        if self._file != outcome.ref.file:
            self._file = outcome.ref.file
            self._caches = {flag: Cache(config, self.encoder) for flag, config in self.settings.items()}
        for flag, cache in self._caches.items():
            self._spliced[flag] += cache.serve(outcome.ref, outcome.agent, outcome.encoded).num_chunk_hit

    def gains(self, figures: Tally) -> list[tuple[str, int]]:
        """The settings that splice notably more than was counted, each with all tokens that it splices."""
        least = figures.chunk_tokens + _MUCH * figures.prompt_tokens
        return [(flag, count) for flag, count in self._spliced.items() if count >= least]
