"""Clocks of calls, on the host or on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import torch

_WARMUP: Final = 2
_LEAST_SAMPLES: Final = 3
_LIMIT_S: Final = 5.0
# GPU cycles that keep the device busy while the host queues a call, so that events time the device alone.
_SPIN_CYCLES: Final = 2_000_000
_Call: TypeAlias = Callable[[], object]


def device_seconds(call: _Call, device: torch.device) -> float:
    """Seconds that a GPU works on a call, by events; on another device from the call until the device is idle again."""
    if device.type != "cuda":
        synchronize = torch.get_device_module(device).synchronize
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_SPIN_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def take_turns(ways: Mapping[str, _Call], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of calls of each way, in turn, after two to warm up: a noisy machine is unfair to all ways alike.

    Ways that have taken 5 seconds together get three calls each and no more.
    """
    samples: dict[str, list[float]] = {name: [] for name in ways}
    taken_s = 0.0
    for turn in range(_WARMUP + repeats):
        if turn >= _WARMUP + _LEAST_SAMPLES and taken_s > _LIMIT_S:
            break
        for name, way in ways.items():
            seconds = device_seconds(way, device)
            if turn >= _WARMUP:
                samples[name].append(1e3 * seconds)
                taken_s += seconds
    return samples
