"""Copies KV rows from a host pool (HiCache) into slots of the device's pool, as `splice` copies them between slots."""

from __future__ import annotations

from typing import Final

import torch
from pic_kernels import Backend
from torch import Tensor

from sglang_pic.errors import Refused, UnsupportedError
from sglang_pic.runtime.host_rows import HostView
from sglang_pic.runtime.row_groups import Copy, Slots
from sglang_pic.runtime.splice import Splicer

UNFUSED_FETCH: Final = Refused("only the fused kernel reads them", "start without --enable-hierarchical-cache")


class Fetcher:
    """Copies rows of one host pool; not thread-safe.

    Args:
        splicer: copies rows of the device's pool; it has left out layers (`Splicer.hold`) before.
        host: the host pool.

    Raises:
        UnsupportedError: the fused kernel, the only one that reads host memory, does not cover the pool's rows.
    """

    def __init__(self, splicer: Splicer, host: HostView) -> None:
        self.view, self._splicer, self._host = splicer.view, splicer, host
        choices = [group.choice() for group in splicer.groups]
        if self.view.device.type != "cpu" and any(choice.backend is Backend.EAGER for choice in choices):
            raise UnsupportedError(UNFUSED_FETCH.line(f"rows of {self.view.dtype} in a host pool"))
        self._groups = [(group, group.source(group.on_host(host))) for group in splicer.groups]
        for part in (part for _, source in self._groups for part in source if part is not None):
            # Made here, because that waits for the device.
            part.addresses_on(self.view.device)

    def fetch(self, host_slots: Tensor, dst: Tensor, shifts: Tensor, windows: Tensor | None = None) -> None:
        """Copy rows of the host pool to `dst` in all layers, keys rotated by each token's shift.

        The kernel reads pinned host memory. The caller keeps the host slots locked until the queued work is done.

        Args:
            host_slots: `[n]` int64 slots of the host pool, in host memory; with `windows` of the last `n` of `dst`: of
                the others window rows alone are copied.
            dst: as for `Splicer.splice`, likewise `shifts`.
            windows: one for each of `dst`, int64 slots of the host pool for windows, in host memory; needed where there
                is one.

        Raises:
            TypeError: as `Splicer.splice`, likewise `ValueError`.
        """
        self._splicer.check_shifts(dst, shifts)
        # Only beside windows may there be fewer of the other rows: the last ones.
        start = 0 if self._host.windows is None else len(dst) - len(host_slots)
        copy = Copy(host_slots, dst, shifts, windows, start)
        brought: dict[HostView, Tensor] = {}
        for group, source in self._groups:
            there = group.on_host(self._host)
            src, *written = group.slots(copy)
            if there not in brought:
                brought[there] = _bring(there.rows(src), dst.device)
            group.move(Slots(brought[there], *written), source)


def _bring(slots: Tensor, device: torch.device) -> Tensor:
    """Slots in host memory on `device`; copied from pinned memory, which does not block the host."""
    return slots if device.type == "cpu" else slots.pin_memory().to(device, non_blocking=True)
