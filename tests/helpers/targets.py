"""Where a test of the ops runs: an implementation and a device, the Triton interpreter among them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch

from tests.helpers.splice_cases import Slots

_MODULES = ("triton_rows", "triton_splice", "triton_index")


@dataclass(frozen=True, slots=True)
class Target:
    """An implementation on a device."""

    backend: str
    device: str = "cpu"

    @property
    def is_fused(self) -> bool:
        """Whether it is the Triton kernel, which covers rows of whole 16 bytes only."""
        return self.backend == "triton"

    def sized(self, slots: Slots) -> Slots:
        """`slots`, or few enough of them for the interpreter, which runs a block of lanes in a millisecond."""
        return slots.thinned(12) if self.is_fused and self.device == "cpu" else slots

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes the ops take this implementation."""
        if self.is_fused:
            load_kernels(interpreted=self.device == "cpu")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SGLANG_PIC_KERNELS", self.backend)
            yield


EAGER = Target("eager")
INTERPRETER = Target("triton")
_needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
TARGETS = [
    pytest.param(EAGER, id="eager"),
    pytest.param(Target("reference"), id="reference"),
    pytest.param(INTERPRETER, id="triton", marks=_needs_triton),
    pytest.param(Target("eager", "cuda"), id="eager-gpu", marks=pytest.mark.gpu),
    pytest.param(Target("reference", "cuda"), id="reference-gpu", marks=pytest.mark.gpu),
    pytest.param(Target("triton", "cuda"), id="triton-gpu", marks=pytest.mark.gpu),
]
on_cpu = pytest.mark.parametrize("target", TARGETS[:3], indirect=True)
"""For a test with `target` that takes too much memory of a device; addresses are computed as in the interpreter."""

FUSED_TARGETS = [
    pytest.param(INTERPRETER, id="triton", marks=_needs_triton),
    pytest.param(Target("triton", "cuda"), id="triton-gpu", marks=pytest.mark.gpu),
]


fused = pytest.mark.parametrize("target", FUSED_TARGETS, indirect=True)
"""For a test with `target`: the fused kernel alone, interpreted and on a device."""


def load_kernels(*, interpreted: bool) -> None:
    """The fused kernels as they are with or without `TRITON_INTERPRET=1`, in this process.

    Triton reads the variable when a kernel is decorated, so the kernels' modules are executed again. The variable is
    gone afterwards: no other test, and no server that one starts, shall see it. Triton itself is imported without it,
    since its own library is decorated likewise, once and for all.
    """
    importlib.import_module("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        if interpreted:
            patch.setenv("TRITON_INTERPRET", "1")
        modules = [importlib.import_module(f"pic_kernels.{name}") for name in _MODULES]
        if bool(modules[0].IS_INTERPRETED) is not interpreted:
            for module in modules:
                importlib.reload(module)


def free_memory(num_bytes: int) -> torch.Tensor:
    """`[num_bytes]` of address space, zero, that takes no memory until it is written; skips where it is refused."""
    import mmap

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)
    except OSError as error:
        pytest.skip(f"no {num_bytes} bytes of address space: {error}")
