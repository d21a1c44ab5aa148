"""The first item: is the device there, what is it, and what is installed beside it."""

from __future__ import annotations

import shutil

import torch

from pic_bench.gpu.energy import open_counter
from pic_bench.gpu.record import Found, Work
from sglang_pic.errors import UnsupportedError

_TOOLS = ("nvidia-smi", "compute-sanitizer", "ncu", "nvcc")


def card_of(device: str) -> dict[str, str]:
    """What the driver says of the device; empty where it is none of NVIDIA's."""
    if device != "cuda" or not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": str(properties.total_memory),
        "multiprocessors": str(properties.multi_processor_count),
        "cuda": str(torch.version.cuda),
        "devices": str(torch.cuda.device_count()),
    }


def run(work: Work) -> Found:
    """Multiply two matrices on the device and read its counters."""
    side = 64 if work.is_dry else 4096
    generator = torch.Generator(work.device).manual_seed(0)
    left, right = (torch.randn(side, side, generator=generator, device=work.device) for _ in range(2))
    wide = (left[:8].double() @ right.double()).float()
    failures = [] if torch.allclose((left @ right)[:8], wide, rtol=1e-2, atol=0.5) else ["a product is wrong"]
    notes = [f"{tool} is not on PATH" for tool in _TOOLS if shutil.which(tool) is None]
    try:
        joules = open_counter(torch.device(work.device))()
    except UnsupportedError as error:
        joules = None
        notes.append(str(error))
    return Found(notes=notes, failures=failures, raw={"joules": joules, "tools": [shutil.which(t) for t in _TOOLS]})
