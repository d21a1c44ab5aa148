"""Copies between host and device that do not block the host.

Only a copy from or to pinned memory is asynchronous; `torch.tensor(..., device=device)` waits for all queued work.
Torch keeps pinned memory until the copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def to_device(numbers: Sequence[int] | np.ndarray, device: torch.device | str) -> torch.Tensor:
    """`numbers` on `device`, `[num_numbers]` int64; the copy is queued on the current stream."""
    there = torch.device(device)
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=there.type != "cpu").to(there, non_blocking=True)


def to_host(values: torch.Tensor) -> torch.Tensor:
    """`values` in host memory, readable when the current stream has done the copy."""
    here = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type != "cpu")
    here.copy_(values, non_blocking=True)
    return here


def keep_until_read(values: torch.Tensor) -> None:
    """Keep `values`, allocated on the scheduler's stream, from reuse until the current stream has read them."""
    if values.is_cuda:
        values.record_stream(torch.cuda.current_stream(values.device))
