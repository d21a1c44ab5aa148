"""Which implementation of an op runs: the debug switch and the capability gate.

Owns `SGLANG_PIC_KERNELS`. Knows tensors only by their device.
"""

from __future__ import annotations

import os
from enum import Enum

import torch

__all__ = ["Backend", "select_backend"]

_SWITCH = "SGLANG_PIC_KERNELS"


class Backend(Enum):
    """An implementation of the ops; every op has all of them."""

    HOST = "host"
    """Blocked torch for CPU memory: contiguous spans as slices, one scratch for all layers."""
    DEVICE = "device"
    """Torch without a host synchronisation, for any device."""
    REFERENCE = "reference"
    """Plain torch, readable first, in float32."""


def select_backend(device: torch.device) -> Backend:
    """The implementation for operands on `device`.

    Raises:
        ValueError: the environment variable `SGLANG_PIC_KERNELS` names no implementation.
    """
    chosen = os.environ.get(_SWITCH, "auto")
    if chosen == "auto":
        return Backend.HOST if device.type == "cpu" else Backend.DEVICE
    try:
        backend = Backend(chosen)
    except ValueError:
        allowed = ", ".join(["auto", *(backend.value for backend in Backend)])
        raise ValueError(f"{_SWITCH}={chosen!r}: must be one of {allowed}; unset it for auto.") from None
    if backend is Backend.HOST and device.type != "cpu":
        raise ValueError(f"{_SWITCH}={chosen!r}: covers CPU tensors only, these are on {str(device)!r}; use 'auto'.")
    return backend
