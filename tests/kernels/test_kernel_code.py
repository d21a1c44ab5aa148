"""The machine code of the fused kernels for sm_90, which Triton's compiler makes without a device."""

from __future__ import annotations

import subprocess

import pytest
import torch

from tests.helpers.machine_code import MachineCode, compile_for_gpu, read_machine_code

pytest.importorskip("triton")

from pic_bench.gpu.kernel_pool import PARTIAL, SHAPES, Shape

from tests.helpers.splice_cases import load_kernels

DTYPES = {
    "DeepSeek-V2-Lite": (torch.bfloat16, torch.float8_e4m3fn),
    "Llama-3.1-8B": (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn),
    "SmolLM2-135M": (torch.bfloat16,),
    "Phi-2 (partial)": (torch.bfloat16,),
    "GLM-4-9B (partial)": (torch.bfloat16,),
}
CASES = [(model, (SHAPES | PARTIAL)[model], dtype) for model, dtypes in DTYPES.items() for dtype in dtypes]


def measure(shape: Shape, dtype: torch.dtype) -> MachineCode:
    """The code of a shape, compiled as a launch would; skips where Triton cannot compile or disassemble it."""
    copied_bytes = 0 if shape.latent else shape.heads * shape.dim * dtype.itemsize
    try:
        from pic_kernels import triton_splice

        kernel = triton_splice.constants(
            shape.heads, shape.dim, shape.latent, shape.rotary_dim, shape.is_neox, dtype, copied_bytes
        )
        compiled = compile_for_gpu(triton_splice._splice_kernel, kernel, aligned=("table", "turns"))
        return read_machine_code(compiled)
    except (ImportError, OSError, RuntimeError, TypeError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot be compiled for sm_90 here: {error}")


@pytest.fixture(autouse=True)
def _compiled() -> None:
    load_kernels(interpreted=False)


@pytest.mark.parametrize(
    ("shape", "dtype"), [case[1:] for case in CASES], ids=[f"{case[0]}-{case[2]}" for case in CASES]
)
def test_rows_move_in_16_bytes_and_nothing_leaves_registers(shape: Shape, dtype: torch.dtype) -> None:
    code = measure(shape, dtype)
    assert set(code.row_loads) == set(code.row_stores) == {16}
    assert code.row_loads == code.row_stores
    assert (code.stack_bytes, code.shared_bytes) == (0, 0)
    # 16 bytes in flight per thread and load, eight loads: 512 threads are 64 KiB of a multiprocessor's reads.
    assert code.threads_per_sm >= 512


def test_narrow_rows_are_seen() -> None:
    """The count can fail: a head of 60 dimensions leaves pairs that only 8 bytes can hold."""
    code = measure(Shape(heads=2, dim=60, rotary_dim=60), torch.bfloat16)
    assert not code.is_good
    assert 16 in code.row_stores  # the values
    assert set(code.row_stores) != {16}
