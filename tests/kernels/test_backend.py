"""Which implementation is chosen, and what the gate of the fused kernels says."""

from __future__ import annotations

import pytest
import torch
from pic_kernels import Backend, Choice, LayerBuffers, RopeParams, choose_mha, choose_mla, splice_mla
from pic_kernels.backend import choose_backend

from tests.helpers.splice_cases import make_rope
from tests.helpers.targets import INTERPRETER, load_kernels

ROPE = make_rope(8, is_neox=True)
PAIRED = make_rope(8, is_neox=False)


@pytest.fixture(autouse=True)
def _auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PIC_KERNELS", raising=False)


def _rows(dim: int = 8, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LayerBuffers:
    return LayerBuffers([torch.zeros((4, 1, dim), dtype=dtype, device=device) for _ in range(2)])


def test_a_cpu_takes_eager_torch() -> None:
    assert choose_mha(_rows(), _rows(), ROPE) == Choice(Backend.EAGER)


def test_a_device_takes_the_fused_kernel_where_it_covers_the_operands() -> None:
    cuda = torch.device("cuda")
    assert choose_backend(cuda, lambda: "") == Choice(Backend.TRITON)
    assert choose_backend(cuda, lambda: "rows too odd") == Choice(Backend.EAGER, "rows too odd")


def test_a_device_that_is_no_nvidia_gpu_runs_in_torch_and_says_why() -> None:
    pytest.importorskip("triton")
    backend, reason = choose_mla(_rows(device="meta"), ROPE, rope_offset=0)
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
        choose_mla(rows, rope, rope_offset=offset)


def test_values_are_looked_at_too_and_halves_may_start_anywhere() -> None:
    pytest.importorskip("triton")
    with INTERPRETER.active():
        with pytest.raises(ValueError, match="rows of 24 bytes"):
            choose_mha(_rows(), _rows(6), ROPE)
        assert choose_mla(_rows(12), PAIRED, rope_offset=2).backend is Backend.TRITON
        assert choose_mla(_rows(12), ROPE, rope_offset=3).backend is Backend.TRITON


def test_compiled_kernels_refuse_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    load_kernels(interpreted=False)
    monkeypatch.setenv("SGLANG_PIC_KERNELS", "triton")
    one = torch.tensor([1])
    with pytest.raises(ValueError, match=r"SGLANG_PIC_KERNELS='triton'.*TRITON_INTERPRET=1"):
        splice_mla(_rows(), one, one + 1, one, ROPE, rope_offset=0)
