"""A kernel compiled for a GPU that need not be there, exactly as a launch compiles it.

Owns the one place that knows how a launch specialises its arguments: tables start at multiples of 16 bytes, counts and
index tensors are specialised on nothing. Imports triton.
"""

from __future__ import annotations

from typing import TypeAlias

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import JITFunction

from .triton_rows import LAUNCH_OPTIONS

__all__ = ["Constant", "compile_ahead"]

Constant: TypeAlias = int | bool | tl.dtype


def compile_ahead(kernel: JITFunction, constants: tuple[Constant, ...], target: GPUTarget) -> CompiledKernel:
    """`kernel`, whose last parameters are `constants`, as its launches on `target` compile it, int64 shifts.

    Raises:
        TypeError: the kernels are interpreted in this process.
    """
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"{kernel!r} is interpreted: unset TRITON_INTERPRET to compile it.")
    num_run_time = len(kernel.arg_names) - len(constants)
    run_time, compile_time = kernel.arg_names[:num_run_time], kernel.arg_names[num_run_time:]
    signature = {name: "i32" if name.startswith("num_") else "*i64" for name in run_time}
    aligned = [index for index, name in enumerate(run_time) if name.endswith(("table", "turns"))]
    source = ASTSource(
        kernel,
        signature | dict.fromkeys(compile_time, "constexpr"),
        dict(zip(compile_time, constants, strict=True)),
        {(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    return triton.compile(source, target=target, options=dict(LAUNCH_OPTIONS))
