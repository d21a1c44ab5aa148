"""Owns the energy of a GPU as NVML counts it: joules of a piece of work that is repeated, and watts of doing nothing.

The counter is the board's own and moves every few tens of milliseconds, so work is repeated for seconds. Idle power
is stated beside it and never taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch

__all__ = ["Energy", "EnergyCounter", "measure_energy", "measure_idle", "open_counter"]


class Energy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one piece of work, repeated `repeats` times in `seconds`, one after the other."""

    repeats: int
    seconds: float
    joules_each: float
    watts: float
    """Mean power of the board meanwhile."""


class EnergyCounter(Protocol):
    """A counter of joules that only grows."""

    def joules(self) -> float:
        """Since the driver was loaded."""
        ...


class _Nvml:
    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def joules(self) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3


def open_counter(device: torch.device) -> tuple[EnergyCounter | None, str]:
    """The counter of `device`, or None and why there is none."""
    if device.type != "cuda":
        return None, f"energy: {device.type} has no NVML counter"
    try:
        import pynvml
    except ImportError as error:
        return None, f"energy: {error}"
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        counter = _Nvml(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        counter.joules()
    except pynvml.NVMLError as error:
        return None, f"energy: NVML: {error}"
    return counter, ""


def measure_energy(work: Callable[[], None], counter: EnergyCounter, least_s: float) -> Energy:
    """Repeat `work`, which returns when the device is done with it, for at least `least_s` seconds.

    As long a fifth before it is not counted: the clocks and the counter follow the load with a delay.
    """
    _repeat(work, least_s / 5)
    begin_j, begin = counter.joules(), time.perf_counter()
    repeats = _repeat(work, least_s)
    seconds, joules = time.perf_counter() - begin, counter.joules() - begin_j
    return Energy(repeats=repeats, seconds=seconds, joules_each=joules / repeats, watts=joules / seconds)


def measure_idle(counter: EnergyCounter, seconds: float) -> float:
    """Watts while nothing runs, with the process's context open."""
    # What ran before has to fade first.
    time.sleep(seconds / 2)
    begin_j, begin = counter.joules(), time.perf_counter()
    time.sleep(seconds)
    return (counter.joules() - begin_j) / (time.perf_counter() - begin)


def _repeat(work: Callable[[], None], least_s: float) -> int:
    end, repeats = time.perf_counter() + least_s, 0
    while not repeats or time.perf_counter() < end:
        work()
        repeats += 1
    return repeats
