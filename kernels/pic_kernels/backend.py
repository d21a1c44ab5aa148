"""Which implementation of an op runs: `SGLANG_PIC_KERNELS` says, or else the device and the capability gate."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch

_SWITCH = "SGLANG_PIC_KERNELS"


class Backend(Enum):
    """An implementation; every op has all of them."""

    TRITON = "triton"
    """One fused launch per call, for operands that `coverage` admits; on a CPU in the Triton interpreter."""
    EAGER = "eager"
    """Torch without a host synchronisation, for any device and for CPUs."""
    REFERENCE = "reference"
    """Plain torch, readable first, in float32."""


class Choice(NamedTuple):
    """An implementation, and the reason where a faster one exists."""

    backend: Backend
    reason: str = ""


def choose_backend(device: torch.device, refusal: Callable[[], str]) -> Choice:
    """The implementation for operands on `device`.

    Args:
        device: where the buffers are.
        refusal: says why the fused kernel does not cover the operands, or an empty string. Called only where the
            answer matters.

    Raises:
        ValueError: `SGLANG_PIC_KERNELS` names no implementation, or one that does not cover the operands.
    """
    chosen = os.environ.get(_SWITCH, "auto")
    if chosen == "auto":
        if device.type == "cpu":
            return Choice(Backend.EAGER)
        reason = refusal()
        return Choice(Backend.EAGER, reason) if reason else Choice(Backend.TRITON)
    try:
        backend = Backend(chosen)
    except ValueError:
        allowed = ", ".join(["auto", *(backend.value for backend in Backend)])
        raise ValueError(f"{_SWITCH}={chosen!r}: must be one of {allowed}; unset it for auto.") from None
    if backend is Backend.TRITON and (reason := refusal()):
        raise ValueError(f"{_SWITCH}={chosen!r}: does not cover these operands: {reason}; use 'auto'.")
    return Choice(backend, f"{_SWITCH}={chosen!r}")
