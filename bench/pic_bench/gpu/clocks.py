"""Clocks of calls, on the host or on the device, and of the energy that they take.

NVML's counter is the board's own and moves every few tens of milliseconds, so work is repeated for seconds.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import torch

from sglang_pic.errors import UnsupportedError

_WARMUP: Final = 2
_LEAST_SAMPLES: Final = 3
_LIMIT_S: Final = 5.0
# GPU cycles that keep the device busy while the host queues a call, so that events time the device alone.
_SPIN_CYCLES: Final = 2_000_000
_Call: TypeAlias = Callable[[], object]


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
    ways: Mapping[str, _Call],
    repeats: int,
    device: torch.device,
    clock: Callable[[_Call, torch.device], float] = host_seconds,
) -> dict[str, list[float]]:
    """Milliseconds of calls of each way, in turn, after two to warm up: a noisy machine is unfair to all ways alike.

    Ways that have taken 5 seconds together get three calls each and no more.
    """
    samples: dict[str, list[float]] = {name: [] for name in ways}
    taken_s = 0.0
    for turn in range(_WARMUP + repeats):
        if turn >= _WARMUP + _LEAST_SAMPLES and taken_s > _LIMIT_S:
            break
        for name, way in ways.items():
            seconds = clock(way, device)
            if turn >= _WARMUP:
                samples[name].append(1e3 * seconds)
                taken_s += seconds
    return samples


JouleCounter = Callable[[], float]
"""Joules since the driver was loaded."""


def open_counter(device: torch.device) -> JouleCounter:
    """The counter of `device`, from the library that comes with NVIDIA's driver.

    Raises:
        UnsupportedError: there is none; the message says why.
    """
    if device.type != "cuda":
        raise UnsupportedError(f"energy: {device.type} has no NVML counter")
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise UnsupportedError(f"energy: {error}") from error
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()

    def call(name: str, *arguments: object) -> None:
        if status := getattr(nvml, name)(*arguments):
            raise UnsupportedError(f"energy: {name} gave NVML's error {status}")

    def joules() -> float:
        call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    call("nvmlInit_v2")
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
    joules()
    return joules


def joules_each(work: _Call, joules: JouleCounter, least_s: float) -> float:
    """Joules of one call of `work`, which returns when the device is done, repeated for at least `least_s` seconds.

    A fifth as long before it is not counted: the clocks and the counter follow the load with a delay.
    """
    for seconds in (least_s / 5, least_s):
        begin_j, begin, repeats = joules(), time.perf_counter(), 0
        while not repeats or time.perf_counter() - begin < seconds:
            work()
            repeats += 1
    return (joules() - begin_j) / repeats
