"""The assertion of slots that a device makes for itself; it raises at once on a CPU, where it is tested."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from pic_kernels.slots import assert_slots, guard_slots


def _ids(*slots: int) -> torch.Tensor:
    return torch.tensor(slots)


def test_slots_within_the_contract_pass() -> None:
    assert_slots(_ids(0, 7, 0), _ids(3, 1, 2), 8)


@pytest.mark.parametrize(
    ("src", "dst", "match"),
    [
        (_ids(1, 2), _ids(2, 3), "share a slot"),
        (_ids(1, 2), _ids(3, 3), "names a slot twice"),
        (_ids(1, 8), _ids(3, 4), "out of bounds"),
        (_ids(1, 2), _ids(3, -1), "out of bounds"),
    ],
)
def test_slots_outside_the_contract_stop_the_device(src: torch.Tensor, dst: torch.Tensor, match: str) -> None:
    with pytest.raises(RuntimeError, match=match):
        assert_slots(src, dst, 8)


def test_the_switch_is_read_for_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _ids(1).to("meta")
    monkeypatch.setenv("SGLANG_PIC_CHECK_SLOTS", "yes")
    with pytest.raises(ValueError, match="SGLANG_PIC_CHECK_SLOTS='yes': must be 0 or 1"):
        guard_slots(broken, broken, 4)
    guard_slots(_ids(1), _ids(2), 4)
    monkeypatch.delenv("SGLANG_PIC_CHECK_SLOTS")
    guard_slots(broken, broken, 4)
    with pytest.raises(ValueError, match="share 1 slots"):
        guard_slots(_ids(1), _ids(1), 4)


@pytest.mark.gpu
def test_a_device_refuses_a_splice_of_shared_slots() -> None:
    """In a process of its own: a device-side assertion ends the context."""
    code = (
        "import torch, pic_kernels as p\n"
        "rope = p.RopeParams(torch.ones(4, device='cuda'), 8, True)\n"
        "rows, slots = [torch.zeros(8, 1, 8, device='cuda')], torch.arange(2, device='cuda')\n"
        "p.splice_mla(rows, slots, slots + 1, slots, rope, rope_offset=0)\n"
        "torch.cuda.synchronize()\n"
    )
    for switch, is_refused in (("0", False), ("1", True)):
        command = ["env", f"SGLANG_PIC_CHECK_SLOTS={switch}", sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        assert (done.returncode != 0) is is_refused, done.stderr
