"""Which implementation is chosen, and what the gate of the fused kernels says."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from pic_kernels import Backend, Choice, LayerBuffers, RopeParams, choose_rows, splice_rows
from pic_kernels.backend import choose_backend
from pic_kernels.slots import assert_slots, guard_slots

from tests.helpers.splice_cases import INTERPRETER, load_kernels, make_rope

ROPE = make_rope(8, is_neox=True)
PAIRED = make_rope(8, is_neox=False)


@pytest.fixture(autouse=True)
def _auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PIC_KERNELS", raising=False)


def _rows(dim: int = 8, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LayerBuffers:
    return LayerBuffers([torch.zeros((4, 1, dim), dtype=dtype, device=device) for _ in range(2)])


def test_a_cpu_takes_eager_torch() -> None:
    assert choose_rows(_rows(), _rows(), ROPE) == Choice(Backend.EAGER)


def test_a_device_takes_the_fused_kernel_where_it_covers_the_operands() -> None:
    cuda = torch.device("cuda")
    assert choose_backend(cuda, lambda: "") == Choice(Backend.TRITON)
    assert choose_backend(cuda, lambda: "rows too odd") == Choice(Backend.EAGER, "rows too odd")


def test_a_device_that_is_no_nvidia_gpu_runs_in_torch_and_says_why() -> None:
    pytest.importorskip("triton")
    backend, reason = choose_rows(_rows(device="meta"), None, ROPE)
    assert backend is Backend.EAGER
    assert "'meta' tensors" in reason


@pytest.mark.parametrize(
    ("rows", "rope", "offset", "reason"),
    [
        (_rows(10), ROPE, 0, "rows of 40 bytes do not start at multiples of 16 bytes"),
        (_rows(12, dtype=torch.bfloat16), ROPE, 0, "rows of 24 bytes"),
        (LayerBuffers([torch.zeros(33)[1:].view(4, 1, 8)]), ROPE, 0, "in every layer"),
        (LayerBuffers([torch.zeros(2, 4, 9)]), PAIRED, 0, "pairs start at odd dimensions: offset 0 in rows of 9"),
        (_rows(12), PAIRED, 3, "offset 3"),
    ],
)
def test_the_gate_names_what_it_does_not_cover(rows: LayerBuffers, rope: RopeParams, offset: int, reason: str) -> None:
    pytest.importorskip("triton")
    with INTERPRETER.active(), pytest.raises(ValueError, match=reason):
        choose_rows(rows, None, rope, rope_offset=offset)


def test_values_are_looked_at_too_and_halves_may_start_anywhere() -> None:
    pytest.importorskip("triton")
    with INTERPRETER.active():
        with pytest.raises(ValueError, match="rows of 24 bytes"):
            choose_rows(_rows(), _rows(6), ROPE)
        assert choose_rows(_rows(12), None, PAIRED, rope_offset=2).backend is Backend.TRITON
        assert choose_rows(_rows(12), None, ROPE, rope_offset=3).backend is Backend.TRITON


def test_compiled_kernels_refuse_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    load_kernels(interpreted=False)
    monkeypatch.setenv("SGLANG_PIC_KERNELS", "triton")
    one = torch.tensor([1])
    with pytest.raises(ValueError, match=r"SGLANG_PIC_KERNELS='triton'.*TRITON_INTERPRET=1"):
        splice_rows(_rows(), None, one, one + 1, one, ROPE)


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
        "p.splice_rows(rows, None, slots, slots + 1, slots, rope)\n"
        "torch.cuda.synchronize()\n"
    )
    for switch, is_refused in (("0", False), ("1", True)):
        command = ["env", f"SGLANG_PIC_CHECK_SLOTS={switch}", sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        assert (done.returncode != 0) is is_refused, done.stderr
