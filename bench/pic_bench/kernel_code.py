"""What Triton makes of the fused kernels for a GPU that need not be here: access widths, registers, spills.

Owns `python -m pic_bench.kernel_code`. Compiles every shape as a launch would, disassembles it and counts. A kernel is
good when all rows move in 16-byte accesses, nothing lies in local or shared memory and registers leave room for enough
threads; anything else fails the command. Says nothing about time.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from sglang_pic.errors import BenchError

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel

__all__ = ["CASES", "KernelCode", "Shape", "main", "measure"]


class KernelCode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine code of one kernel at one shape."""

    schema_version: int = 1
    model: str
    op: str
    dtype: str
    target: str
    triton: str
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
    local_accesses: int
    shared_accesses: int

    @property
    def is_good(self) -> bool:
        """16 bytes at a time, nothing outside registers."""
        beside = self.stack_bytes + self.shared_bytes + self.local_accesses + self.shared_accesses
        return not beside and set(self.row_stores) == {16} and self.row_loads == self.row_stores


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """KV rows of a model; `latent` is 0 where keys and values have buffers of their own."""

    heads: int
    dim: int
    rotary_dim: int
    is_neox: bool = True
    latent: int = 0


_LLAMA: Final = Shape(heads=8, dim=128, rotary_dim=128)
_DEEPSEEK: Final = Shape(heads=1, dim=576, rotary_dim=64, is_neox=False, latent=512)
CASES: Final[tuple[tuple[str, Shape, torch.dtype], ...]] = (
    ("DeepSeek-V2-Lite", _DEEPSEEK, torch.bfloat16),
    ("DeepSeek-V2-Lite", _DEEPSEEK, torch.float8_e4m3fn),
    ("Llama-3.1-8B", _LLAMA, torch.bfloat16),
    ("Llama-3.1-8B", _LLAMA, torch.float16),
    ("Llama-3.1-8B", _LLAMA, torch.float32),
    ("Llama-3.1-8B", _LLAMA, torch.float8_e4m3fn),
    ("SmolLM2-135M", Shape(heads=3, dim=64, rotary_dim=64), torch.bfloat16),
    ("Phi-2 (partial)", Shape(heads=32, dim=80, rotary_dim=32), torch.bfloat16),
    ("GLM-4-9B (partial)", Shape(heads=2, dim=128, rotary_dim=64, is_neox=False), torch.bfloat16),
)
_REGISTERS_PER_SM: Final = 65_536


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, count and print; 1 if a kernel is not as wanted."""
    parser = argparse.ArgumentParser(prog="python -m pic_bench.kernel_code", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90, help="compute capability, 90 for sm_90")
    parser.add_argument("--json", action="store_true", help="one JSON object per kernel")
    args = parser.parse_args(argv)
    if not args.json:
        columns = ("loads", "stores", "local", "shared", "registers", "threads", "SASS")
        print(f"{'model':20}{'op':12}{'dtype':15}" + "".join(f"{column:>11}" for column in columns))
    is_good = True
    try:
        for model, shape, dtype in CASES:
            code = measure(model, shape, dtype, args.arch)
            is_good &= code.is_good
            print(msgspec.json.encode(code).decode() if args.json else _line(code), flush=True)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    if not args.json:
        print(
            "\nloads, stores: of rows, count x bytes; local, shared: bytes; threads: a multiprocessor's, by registers."
        )
    return 0 if is_good else 1


def measure(model: str, shape: Shape, dtype: torch.dtype, arch: int) -> KernelCode:
    """Compile one case and count.

    Raises:
        BenchError: triton, its compiler or its disassembler is not here.
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
    except ImportError as error:
        raise BenchError("triton is not installed: pip install triton.") from error
    try:
        compiled = _compile(shape, dtype, GPUTarget("cuda", arch, 32))
        usage, sass = _resources(compiled.asm["cubin"]), compiled.asm["sass"]
    except (OSError, RuntimeError, TypeError, subprocess.CalledProcessError) as error:
        raise BenchError(f"{model}, {dtype}: cannot be compiled for sm_{arch} here: {error}") from error
    accesses = Counter(re.findall(r"\b((?:LDG|STG|LDL|STL|LDS|STS|LDSM|STSM)\b[.\w]*)", sass))
    loads, stores = _row_accesses(compiled.asm["ptx"])
    return KernelCode(
        model=model,
        op="splice_mla" if shape.latent else "splice_mha",
        dtype=str(dtype).removeprefix("torch."),
        target=f"sm_{arch}",
        triton=triton.__version__,
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        shared_bytes=compiled.metadata.shared,
        threads_per_sm=min(2_048, _REGISTERS_PER_SM // (-(-usage["REG"] // 8) * 8) // 128 * 128),
        instructions=sass.count(";"),
        row_loads=loads,
        row_stores=stores,
        local_accesses=sum(count for name, count in accesses.items() if name.startswith(("LDL", "STL"))),
        shared_accesses=sum(count for name, count in accesses.items() if name.startswith(("LDS", "STS"))),
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
    loads, stores = (Counter(re.findall(rf"@!?%p\d+ {op}\.global\S*?((?:\.v\d)?\.b\d+)", ptx)) for op in ("ld", "st"))
    return _by_width({kind: loads[kind] for kind in stores}), _by_width(stores)


def _by_width(kinds: Mapping[str, int]) -> dict[int, int]:
    widths: Counter[int] = Counter()
    for kind, count in kinds.items():
        lanes, bits = re.fullmatch(r"(?:\.v(\d))?\.b(\d+)", kind).groups()  # type: ignore[union-attr]
        widths[int(lanes or 1) * int(bits) // 8] += count
    return dict(widths)


def _line(code: KernelCode) -> str:
    loads, stores = (
        " + ".join(f"{count}x{width}" for width, count in kinds.items()) for kinds in (code.row_loads, code.row_stores)
    )
    cells = (loads, stores, code.stack_bytes, code.shared_bytes, code.registers, code.threads_per_sm, code.instructions)
    verdict = "" if code.is_good else "   NOT AS WANTED"
    return f"{code.model:20}{code.op:12}{code.dtype:15}" + "".join(f"{cell!s:>11}" for cell in cells) + verdict


if __name__ == "__main__":
    sys.exit(main())
