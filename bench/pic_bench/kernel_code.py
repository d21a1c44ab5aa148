"""What Triton makes of the fused kernel for a GPU that need not be here: access widths, registers, spills.

Compiles every shape as a launch would, disassembles the code and counts. A kernel is good when all rows move in 16-byte
accesses, nothing lies in local or shared memory and registers leave room for enough threads; anything else fails the
command. Says nothing about time.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from pic_bench.gpu.kernel_pool import SHAPES, Shape
from pic_bench.report.markdown import Table, markdown_table
from sglang_pic.errors import BenchError

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel


class KernelCode(NamedTuple):
    """The machine code of one kernel at one shape."""

    model: str
    op: str
    dtype: str
    registers: int
    """Per thread."""
    stack_bytes: int
    """Local memory per thread: spills and run-time-indexed arrays; 0 is wanted."""
    shared_bytes: int
    """Per program; 0 is wanted, since no thread needs what another one read."""
    threads_per_sm: int
    """That its registers leave room for, of 2,048."""
    instructions: int
    row_loads: dict[int, int]
    """Loads of what is neither slot, shift, angle nor address, by width in bytes."""
    row_stores: dict[int, int]
    """Stores by width in bytes."""

    @property
    def is_good(self) -> bool:
        """16 bytes at a time, nothing outside registers."""
        in_memory = self.stack_bytes + self.shared_bytes
        return not in_memory and set(self.row_stores) == {16} and self.row_loads == self.row_stores


_SHAPES: Final = SHAPES | {
    "Phi-2 (partial)": Shape(heads=32, dim=80, rotary_dim=32),
    "GLM-4-9B (partial)": Shape(heads=2, dim=128, rotary_dim=64, is_neox=False),
}
_DTYPES: Final = {
    "DeepSeek-V2-Lite": (torch.bfloat16, torch.float8_e4m3fn),
    "Llama-3.1-8B": (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn),
    "SmolLM2-135M": (torch.bfloat16,),
    "Phi-2 (partial)": (torch.bfloat16,),
    "GLM-4-9B (partial)": (torch.bfloat16,),
}
CASES: Final = [(model, _SHAPES[model], dtype) for model, dtypes in _DTYPES.items() for dtype in dtypes]
_REGISTERS_PER_SM: Final = 65_536


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, count and print; 1 if a kernel is not as wanted."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m pic_bench.kernel_code", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90, help="compute capability, 90 for sm_90")
    args = parser.parse_args(argv)
    try:
        codes = [measure(model, shape, dtype, args.arch) for model, shape, dtype in CASES]
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print(markdown_table(Table(_HEADER, [_row(code) for code in codes])))
    print("\nloads, stores: of rows, count x bytes; local, shared: bytes; threads: room by registers, of 2,048")
    return 0 if all(code.is_good for code in codes) else 1


def measure(model: str, shape: Shape, dtype: torch.dtype, arch: int) -> KernelCode:
    """Compile one case and count.

    Raises:
        BenchError: triton, its compiler or its disassembler is not here.
    """
    try:
        from triton.backends.compiler import GPUTarget
    except ImportError as error:
        raise BenchError("triton is not installed: pip install triton.") from error
    try:
        compiled = _compile(shape, dtype, GPUTarget("cuda", arch, 32))
        usage, sass = _resources(compiled.asm["cubin"]), compiled.asm["sass"]
    except (OSError, RuntimeError, TypeError, subprocess.CalledProcessError) as error:
        raise BenchError(f"{model}, {dtype}: cannot be compiled for sm_{arch} here: {error}") from error
    loads, stores = _row_accesses(compiled.asm["ptx"])
    return KernelCode(
        model=model,
        op="splice_mla" if shape.latent else "splice_mha",
        dtype=str(dtype).removeprefix("torch."),
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        shared_bytes=compiled.metadata.shared,
        threads_per_sm=min(2_048, _REGISTERS_PER_SM // (-(-usage["REG"] // 8) * 8) // 128 * 128),
        instructions=sass.count(";"),
        row_loads=loads,
        row_stores=stores,
    )


def _compile(shape: Shape, dtype: torch.dtype, target: GPUTarget) -> CompiledKernel:
    """The kernel of `shape`, imported here: only at this point it is known that triton is installed."""
    from pic_kernels import triton_splice

    copied_bytes = 0 if shape.latent else shape.heads * shape.dim * dtype.itemsize
    const = triton_splice.constants(
        shape.heads, shape.dim, shape.latent, shape.rotary_dim, shape.is_neox, dtype, copied_bytes
    )
    return triton_splice.compile_for(const, target)


def _resources(cubin: bytes) -> dict[str, int]:
    """What the assembler says of registers and memory, by its own names."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", done.stdout)}


def _row_accesses(ptx: str) -> tuple[dict[int, int], dict[int, int]]:
    """Loads and stores of rows, by width in bytes.

    Everything stored is a row. Loads of rows are the masked ones of a type that is also stored: slots, shifts and
    addresses are single 64-bit numbers, angles are not masked. Rows read in narrower words show in the number.
    """
    found = Counter(re.findall(r"@!?%p\d+ (ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx))
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    for (op, lanes, bits), count in found.items():
        if op == "st":
            width = int(lanes or 1) * int(bits) // 8
            loads[width] += found["ld", lanes, bits]
            stores[width] += count
    return dict(loads), dict(stores)


_HEADER: Final = ["model", "op", "dtype", "loads", "stores", "local", "shared", "registers", "threads", "SASS", "good"]


def _row(code: KernelCode) -> list[str]:
    loads, stores = (
        " + ".join(f"{count}x{width}" for width, count in kinds.items()) for kinds in (code.row_loads, code.row_stores)
    )
    counts = (code.stack_bytes, code.shared_bytes, code.registers, code.threads_per_sm, code.instructions)
    verdict = "yes" if code.is_good else "NO"
    return [code.model, code.op, code.dtype, loads, stores, *map(str, counts), verdict]


if __name__ == "__main__":
    sys.exit(main())
