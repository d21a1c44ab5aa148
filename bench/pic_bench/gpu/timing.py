"""Clocks: calls timed in turns, on the host or on the device, and the time that a run has left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, TypeAlias

import msgspec
import torch

_WARMUP: Final = 2
_LEAST_SAMPLES: Final = 3
# GPU cycles that keep the device busy while the host queues a call, so that events time the device alone.
_SPIN_CYCLES: Final = 2_000_000
_Call: TypeAlias = Callable[[], object]


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Milliseconds of one call, in the order they were taken."""

    samples_ms: list[float]

    @property
    def p50_ms(self) -> float:
        """The median."""
        return median(self.samples_ms)


class Deadline:
    """The time that a run may take, and what it left out."""

    def __init__(self, seconds: float) -> None:
        """Start the clock."""
        self._end = time.perf_counter() + seconds
        self.left_out: list[str] = []

    def has(self, seconds: float, what: str) -> bool:
        """Whether `seconds` are left; if not, `what` is noted as left out."""
        if time.perf_counter() + seconds <= self._end:
            return True
        self.left_out.append(f"{what}: no time left")
        return False


def host_seconds(call: _Call, device: torch.device) -> float:
    """Seconds from a call on an idle device until the device is idle again."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begin


def device_seconds(call: _Call, device: torch.device) -> float:
    """Seconds that a GPU works on a call, by events; on a CPU as `host_seconds`."""
    if device.type != "cuda":
        return host_seconds(call, device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_SPIN_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def take_turns(
    ways: Sequence[_Call],
    repeats: int,
    device: torch.device,
    *,
    limit_s: float,
    unlimited: int = 0,
    clock: Callable[[_Call, torch.device], float] = host_seconds,
) -> list[Timing]:
    """Time one call of each way in turn, after two to warm up: a noisy machine is unfair to all ways alike.

    Args:
        limit_s: a way that has taken this long gets three calls and no more,
        unlimited: but the first ways get all `repeats`.
        clock: times one call.
    """
    samples: list[list[float]] = [[] for _ in ways]
    for turn in range(_WARMUP + repeats):
        for index, (way, taken) in enumerate(zip(ways, samples, strict=True)):
            if index >= unlimited and len(taken) >= _LEAST_SAMPLES and sum(taken) > 1e3 * limit_s:
                continue
            milliseconds = 1e3 * clock(way, device)
            if turn >= _WARMUP:
                taken.append(milliseconds)
    return [Timing(samples_ms=taken) for taken in samples]
