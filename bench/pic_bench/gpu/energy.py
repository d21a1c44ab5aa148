"""The energy of a GPU as NVML counts it: joules of a piece of work that is repeated.

The counter is the board's own and moves every few tens of milliseconds, so work is repeated for seconds. Idle power
is stated beside it and never subtracted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch

from sglang_pic.errors import UnsupportedError

JouleCounter = Callable[[], float]
"""Joules since the driver was loaded."""


class Energy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one piece of work, repeated `repeats` times in `seconds`, one after the other."""

    repeats: int
    seconds: float
    joules_each: float
    watts: float
    """Mean power of the board meanwhile."""


def open_counter(device: torch.device) -> JouleCounter:
    """The counter of `device`.

    Raises:
        UnsupportedError: there is none; the message says why.
    """
    if device.type != "cuda":
        raise UnsupportedError(f"energy: {device.type} has no NVML counter")
    try:
        import pynvml
    except ImportError as error:
        raise UnsupportedError(f"energy: {error}") from error
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        raise UnsupportedError(f"energy: NVML: {error}") from error
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3


def measure_energy(work: Callable[[], None], joules: JouleCounter, least_s: float) -> Energy:
    """Repeat `work`, which returns when the device is done with it, for at least `least_s` seconds.

    A fifth as long before it is not counted: the clocks and the counter follow the load with a delay.
    """
    begin_j = begin = 0.0
    for seconds in (least_s / 5, least_s):
        begin_j, begin, repeats = joules(), time.perf_counter(), 0
        while not repeats or time.perf_counter() - begin < seconds:
            work()
            repeats += 1
    taken_s, gained = time.perf_counter() - begin, joules() - begin_j
    return Energy(repeats=repeats, seconds=taken_s, joules_each=gained / repeats, watts=gained / taken_s)
