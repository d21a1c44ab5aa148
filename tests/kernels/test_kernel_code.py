"""The machine code of the fused kernels for sm_90, which Triton's compiler makes without a device."""

from __future__ import annotations

import pytest
import torch

from sglang_pic.errors import BenchError

pytest.importorskip("triton")

from pic_bench.gpu.kernel_pool import Shape
from pic_bench.kernel_code import CASES, measure
from targets import load_kernels


@pytest.fixture(autouse=True)
def _compiled() -> None:
    load_kernels(interpreted=False)


@pytest.mark.parametrize(("model", "shape", "dtype"), CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES])
def test_rows_move_in_16_bytes_and_nothing_leaves_registers(model: str, shape: Shape, dtype: torch.dtype) -> None:
    try:
        code = measure(model, shape, dtype, arch=90)
    except BenchError as error:
        pytest.skip(str(error))
    assert set(code.row_loads) == set(code.row_stores) == {16}
    assert code.row_loads == code.row_stores
    assert (code.stack_bytes, code.shared_bytes) == (0, 0)
    # 16 bytes in flight per thread and load, eight loads: 512 threads are 64 KiB of a multiprocessor's reads.
    assert code.threads_per_sm >= 512


def test_narrow_rows_are_seen() -> None:
    """The count can fail: a head of 60 dimensions leaves pairs that only 8 bytes can hold."""
    try:
        code = measure("odd", Shape(heads=2, dim=60, rotary_dim=60), torch.bfloat16, arch=90)
    except BenchError as error:
        pytest.skip(str(error))
    assert not code.is_good
    assert 16 in code.row_stores  # the values
    assert set(code.row_stores) != {16}
