"""One line a minute in the log, while there is traffic: tokens by source, saved time, and the features' summaries."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sglang_pic.adapter.serve.feature import Features

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 60.0
"""Least time between two lines."""


@dataclass(slots=True)
class _Sums:
    began_at: float
    num_requests: int = 0
    prefix: int = 0
    spliced: int = 0
    computed: int = 0
    saved_us: float = 0.0


class TrafficLog:
    """Sums admitted requests, and logs the sums with the first request after a minute.

    Args:
        features: each may add a part to the line.
        clock: in seconds.
    """

    def __init__(self, features: Features, clock: Callable[[], float] = time.monotonic) -> None:
        self._features, self._clock = features, clock
        self._sums: _Sums | None = None

    def note(self, *, is_new: bool, prefix: int, spliced: int, computed: int, saved_us: float) -> None:
        """Add an admitted prefill chunk, the request's first one if `is_new`; `saved_us` is estimated."""
        now = self._clock()
        if self._sums is not None and now - self._sums.began_at >= INTERVAL_S:
            self._log(self._sums, now)
            self._sums = None
        if self._sums is None:
            self._sums = _Sums(now)
        sums = self._sums
        sums.num_requests += is_new
        sums.prefix += prefix
        sums.spliced += spliced
        sums.computed += computed
        sums.saved_us += saved_us

    def _log(self, sums: _Sums, now: float) -> None:
        total = max(1, sums.prefix + sums.spliced + sums.computed)
        logger.info(
            "sglang_pic: %.0f s: %d requests, %d prompt tokens: %.1f %% prefix hits, %.1f %% spliced, %.1f %% "
            "computed; about %.2f s of prefill saved; %s",
            now - sums.began_at,
            sums.num_requests,
            total,
            100 * sums.prefix / total,
            100 * sums.spliced / total,
            100 * sums.computed / total,
            sums.saved_us / 1e6,
            self._features.summary() or "audits are off",
        )
