"""The contract of a splice's slots: they exist, none is written twice and none is both read and written.

On a CPU `check_slots` reads them. On a device reading them would stall the stream; `SGLANG_PIC_CHECK_SLOTS=1` has the
device assert the contract without an answer to the host.
"""

from __future__ import annotations

import os
from typing import Final

import torch
from torch import Tensor

_SWITCH: Final = "SGLANG_PIC_CHECK_SLOTS"


def guard_slots(src: Tensor, dst: Tensor, num_slots: int, num_sources: int | None = None) -> None:
    """`check_slots` on a CPU; on a device `assert_slots` if `SGLANG_PIC_CHECK_SLOTS=1`, else nothing."""
    if src.device.type == "cpu":
        check_slots(src, dst, num_slots, num_sources)
        return
    switch = os.environ.get(_SWITCH, "0")
    if switch not in ("0", "1"):
        raise ValueError(f"{_SWITCH}={switch!r}: must be 0 or 1; 1 has the device assert the slots of every splice.")
    if switch == "1":
        assert_slots(src, dst, num_slots, num_sources)


def assert_slots(src: Tensor, dst: Tensor, num_slots: int, num_sources: int | None = None) -> None:
    """`check_slots` queued on the current stream before the splice: a few small kernels, no wait.

    A slot outside the contract stops the device before a row is written: the splice never runs, and the process finds a
    device-side assertion at its next synchronisation. For debugging; on a CPU it raises at once.

    Raises:
        RuntimeError: on a CPU, where `check_slots` would raise.
    """
    low = torch.minimum(src.amin(), dst.amin())
    inside = (src.amax() < (num_sources or num_slots)) & (dst.amax() < num_slots)
    # NOTE: private, but the one assertion that torch queues rather than waits for.
    torch._assert_async((low >= 0) & inside, "splice: a slot is out of bounds")
    times = torch.zeros(num_slots, dtype=torch.int32, device=dst.device)
    times.index_add_(0, dst.clamp(0, num_slots - 1), torch.ones_like(dst, dtype=torch.int32))
    torch._assert_async(times.amax() <= 1, "splice: dst names a slot twice")
    if num_sources is not None:
        return
    torch._assert_async(
        times.index_select(0, src.clamp(0, num_slots - 1)).amax() == 0, "splice: src and dst share a slot"
    )


def check_slots(src: Tensor, dst: Tensor, num_slots: int, num_sources: int | None = None) -> None:
    """Slots exist, no target is written twice and none is also a source. Cost O(n + num_slots); CPU tensors.

    With `num_sources`, `src` indexes another buffer of so many slots, which `dst` cannot overlap.

    Raises:
        ValueError: a slot is outside `[0, num_slots)`, repeated in `dst`, or in both `src` and `dst`.
    """
    if not src.numel():
        return
    for name, index, num_rows in (("src", src, num_sources or num_slots), ("dst", dst, num_slots)):
        low, high = (int(bound) for bound in index.aminmax())
        if low < 0 or high >= num_rows:
            raise ValueError(f"{name} holds slots in [{low}, {high}]: must be in [0, {num_rows}).")
    written = torch.zeros(num_slots, dtype=torch.bool)
    written[dst] = True
    if int(written.sum()) != dst.numel():
        raise ValueError("dst names a slot twice: every target slot must be written once.")
    shared = src[written[src]] if num_sources is None else src[:0]
    if shared.numel():
        raise ValueError(
            f"src and dst share {shared.numel()} slots, e.g. {int(shared[0])!r}: a splice must not read what it writes."
        )
