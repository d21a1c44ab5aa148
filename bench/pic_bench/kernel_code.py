"""What Triton makes of the fused kernel for a GPU that need not be here: access widths, registers, spills.

Compiles every shape as a launch would, disassembles the code and counts. A kernel is good when all rows move in 16-byte
accesses, nothing lies in local or shared memory and registers leave room for enough threads; anything else fails the
command. Says nothing about time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

import torch
from pic_kernels.machine_code import MachineCode, read_machine_code

from pic_bench.frame import Finding, Study
from pic_bench.gpu.kernel_pool import PARTIAL, SHAPES, Shape
from pic_bench.report.markdown import Table, markdown_table
from sglang_pic.errors import BenchError

_DTYPES: Final = {
    "DeepSeek-V2-Lite": (torch.bfloat16, torch.float8_e4m3fn),
    "Llama-3.1-8B": (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn),
    "SmolLM2-135M": (torch.bfloat16,),
    "Phi-2 (partial)": (torch.bfloat16,),
    "GLM-4-9B (partial)": (torch.bfloat16,),
}
CASES: Final = [(model, (SHAPES | PARTIAL)[model], dtype) for model, dtypes in _DTYPES.items() for dtype in dtypes]


STUDY = Study("kernel_code", __doc__, has_out=False)
STUDY.add("--arch", type=int, default=90, help="compute capability, 90 for sm_90")


@STUDY.measures
def main(args: argparse.Namespace, _logs: Path) -> Finding:
    """Compile, count and print; 1 if a kernel is not as wanted."""
    codes = [measure(model, shape, dtype, args.arch) for model, shape, dtype in CASES]
    rows = [
        [model, "splice_mla" if shape.latent else "splice_mha", str(dtype).removeprefix("torch."), *_cells(code)]
        for (model, shape, dtype), code in zip(CASES, codes, strict=True)
    ]
    header = ["model", "op", "dtype", "loads", "stores", "local", "shared", "registers", "threads", "SASS", "good"]
    note = "loads, stores: of rows, count x bytes; local, shared: bytes; threads: room by registers, of 2,048"
    shown = f"{markdown_table(Table(header, rows))}\n\n{note}"
    return Finding(None, shown, 0 if all(code.is_good for code in codes) else 1)


def measure(model: str, shape: Shape, dtype: torch.dtype, arch: int) -> MachineCode:
    """Compile one case and count.

    Raises:
        BenchError: triton, its compiler or its disassembler is not here.
    """
    copied_bytes = 0 if shape.latent else shape.heads * shape.dim * dtype.itemsize
    try:
        from pic_kernels import triton_splice
        from triton.backends.compiler import GPUTarget

        kernel = triton_splice.constants(
            shape.heads, shape.dim, shape.latent, shape.rotary_dim, shape.is_neox, dtype, copied_bytes
        )
        return read_machine_code(triton_splice.compile_for(kernel, GPUTarget("cuda", arch, 32)))
    except (ImportError, OSError, RuntimeError, TypeError, subprocess.CalledProcessError) as error:
        raise BenchError(f"{model}, {dtype}: cannot be compiled for sm_{arch} here: {error}") from error


def _cells(code: MachineCode) -> list[str]:
    loads, stores = (
        " + ".join(f"{count}x{width}" for width, count in kinds.items()) for kinds in (code.row_loads, code.row_stores)
    )
    counts = (code.stack_bytes, code.shared_bytes, code.registers, code.threads_per_sm, code.instructions)
    return [loads, stores, *map(str, counts), "yes" if code.is_good else "NO"]


if __name__ == "__main__":
    sys.exit(main())
