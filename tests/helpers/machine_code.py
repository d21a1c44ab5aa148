"""Reads the access widths, registers and spills of a compiled Triton kernel from its PTX and its cubin."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

_REGISTERS_PER_SM: Final = 65_536


class MachineCode(NamedTuple):
    """The machine code of one compiled kernel."""

    stack_bytes: int
    """Local memory per thread: spills and run-time-indexed arrays; 0 is wanted."""
    shared_bytes: int
    """Per program; 0 is wanted, since no thread needs what another one read."""
    threads_per_sm: int
    """Threads that its registers leave room for, of 2,048."""
    row_loads: dict[int, int]
    """Loads of rows, by width in bytes: all but slots, shifts, angles and addresses."""
    row_stores: dict[int, int]
    """Stores by width in bytes."""

    @property
    def is_good(self) -> bool:
        """16 bytes at a time, nothing outside registers."""
        in_memory = self.stack_bytes + self.shared_bytes
        return not in_memory and set(self.row_stores) == {16} and self.row_loads == self.row_stores


def compile_for_gpu(kernel: Any, constants: Sequence[object], *, aligned: tuple[str, ...] = ()) -> CompiledKernel:
    """A kernel as a launch with int64 indices compiles it for sm_90, without a device.

    Args:
        kernel: of Triton.
        constants: its compile-time parameters, the last ones.
        aligned: ends of the names of parameters that start at multiples of 16 bytes, on which a launch specialises.

    Raises:
        TypeError: kernels are interpreted in this process.
    """
    import triton
    from pic_kernels.triton_rows import LAUNCH_OPTIONS
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime import JITFunction

    if not isinstance(kernel, JITFunction):
        raise TypeError("the kernel is interpreted: unset TRITON_INTERPRET to compile it.")
    names = kernel.arg_names
    run_time, compile_time = names[: -len(constants)], names[-len(constants) :]
    signature = {name: "i32" if name.startswith("num_") else "*i64" for name in run_time}
    source = ASTSource(
        kernel,
        signature | dict.fromkeys(compile_time, "constexpr"),
        dict(zip(compile_time, constants, strict=True)),
        {(at,): [["tt.divisibility", 16]] for at, name in enumerate(run_time) if aligned and name.endswith(aligned)},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(LAUNCH_OPTIONS))


def read_machine_code(compiled: CompiledKernel) -> MachineCode:
    """Read and count.

    Raises:
        OSError, RuntimeError, CalledProcessError: Triton's disassembler cannot be run.
    """
    usage = _resources(compiled.asm["cubin"])
    loads, stores = _row_accesses(compiled.asm["ptx"])
    return MachineCode(
        stack_bytes=usage["STACK"],
        shared_bytes=compiled.metadata.shared,
        threads_per_sm=min(2_048, _REGISTERS_PER_SM // (-(-usage["REG"] // 8) * 8) // 128 * 128),
        row_loads=loads,
        row_stores=stores,
    )


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
