"""Measures at start-up what it costs to read a row from the host."""

from __future__ import annotations

from typing import Final

import torch

from sglang_pic.adapter.probe.borrowed_slots import longest_borrowed
from sglang_pic.adapter.probe.window_slots import map_windows
from sglang_pic.adapter.sglang.seams import TpGroup
from sglang_pic.adapter.startup.calibration import time_run
from sglang_pic.runtime.fetch import Fetcher

_FETCHED_ROWS: Final = 2_048


def calibrate_fetch(fetcher: Fetcher, num_host_slots: int, tp_group: TpGroup | None) -> float:
    """Microseconds to copy a row from the host, on the slowest rank.

    Host and pool must have no rows yet, and the pool is left empty.

    Args:
        fetcher: copies the model's rows.
        num_host_slots: of the host, and of its pool for windows.
        tp_group: the ranks.
    """
    view = fetcher.view
    num_rows = min(_FETCHED_ROWS, num_host_slots, longest_borrowed(view, 1))
    host_slots = torch.arange(num_rows, dtype=torch.int64)
    dst = host_slots.to(view.device) + view.page_size
    shifts = torch.full_like(dst, 7)
    with map_windows(view, dst):
        timing = time_run(lambda: fetcher.fetch(host_slots, dst, shifts, host_slots), view.device, tp_group)
        # What the host had there were no rows.
        view.fill(dst, 0)
    return timing.us / num_rows
