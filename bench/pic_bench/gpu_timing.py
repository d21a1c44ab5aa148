"""Owns the clocks of `bench-prefill`: ways timed in turns, and the time that is left.

It must not know what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import msgspec
import torch

__all__ = ["Deadline", "Timing", "take_turns", "wait_for"]

_WARMUP: Final = 2
_LEAST_SAMPLES: Final = 3


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Milliseconds from the call on an idle device until it is idle again, in the order they were taken."""

    samples_ms: list[float]

    @property
    def p50_ms(self) -> float:
        """The median."""
        return median(self.samples_ms)


class Deadline:
    """The time a run may take."""

    def __init__(self, seconds: float) -> None:
        """It begins at once."""
        self._end = time.perf_counter() + seconds
        self.left_out: list[str] = []

    def has(self, seconds: float, what: str) -> bool:
        """Whether `seconds` are left; if not, `what` is noted as left out."""
        if time.perf_counter() + seconds <= self._end:
            return True
        self.left_out.append(f"{what}: no time left")
        return False


def take_turns(
    ways: Sequence[Callable[[], object]], repeats: int, limit_s: float, device: torch.device
) -> list[Timing]:
    """One call of each way in turn, `repeats` times or for `limit_s` seconds; at least three, and two to warm up."""
    samples: list[list[float]] = [[] for _ in ways]
    begin = time.perf_counter()
    for turn in range(_WARMUP + repeats):
        if turn >= _WARMUP + _LEAST_SAMPLES and time.perf_counter() - begin > limit_s:
            break
        for way, taken in zip(ways, samples, strict=True):
            wait_for(device)
            start = time.perf_counter()
            way()
            wait_for(device)
            if turn >= _WARMUP:
                taken.append(1e3 * (time.perf_counter() - start))
    return [Timing(samples_ms=taken) for taken in samples]


def wait_for(device: torch.device) -> None:
    """Return when the device has done everything queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
