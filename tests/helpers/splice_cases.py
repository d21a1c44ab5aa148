"""Operands for the tests of the splice ops, and the comparison of what they do with exact results."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import gcd

import pytest
import torch
from pic_bench.gpu.kernel_pool import exact_turn
from pic_kernels import RopeParams, splice_rows
from pic_kernels.numerics import MAX_TESTED_SHIFT, ROTATE_REL_L2, relative_l2
from torch import Tensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def make_rope(rotary_dim: int, *, is_neox: bool, base: float = 10_000.0) -> RopeParams:
    """Unscaled frequencies, as a model without RoPE scaling has them."""
    inv_freq = 1.0 / base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    return RopeParams(inv_freq=inv_freq, rotary_dim=rotary_dim, is_neox_style=is_neox)


@dataclass(slots=True)
class Slots:
    """Disjoint source and target slots of a pool, with the shifts between them."""

    num_slots: int
    src: Tensor
    dst: Tensor
    shifts: Tensor

    def on(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        return self.src.to(device), self.dst.to(device), self.shifts.to(device)

    def thinned(self, max_len: int) -> Slots:
        """At most `max_len` of the tokens, spread over all of them."""
        step = -(-self.src.numel() // max_len)
        return Slots(self.num_slots, *(each[::step].clone() for each in (self.src, self.dst, self.shifts)))


def scattered(num_tokens: int, shifts: Tensor, *, seed: int = 0, spare: int = 7) -> Slots:
    """Slots in random order, with `spare` slots that a splice must not touch."""
    num_slots = 2 * num_tokens + spare
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))
    return Slots(num_slots, order[:num_tokens].clone(), order[num_tokens : 2 * num_tokens].clone(), shifts)


def spans(lengths: list[int], shifts: list[int]) -> Slots:
    """Runs of slots that follow one another, one shift each, with a gap of one slot between any two."""
    total = sum(lengths) + len(lengths)
    src, dst, per_token, at = [], [], [], 0
    for length, shift in zip(lengths, shifts, strict=True):
        src.append(torch.arange(at, at + length))
        dst.append(torch.arange(at, at + length) + total)
        per_token.append(torch.full((length,), shift))
        at += length + 1
    return Slots(2 * total, torch.cat(src), torch.cat(dst), torch.cat(per_token))


def pages(num_pages: int, page_size: int, shift: int, *, seed: int = 0) -> Slots:
    """Whole pages in random order, as an allocator with `page_size` hands them out."""
    order = torch.randperm(2 * num_pages, generator=torch.Generator().manual_seed(seed))
    rows = (order[:, None] * page_size + torch.arange(page_size)).view(2, -1)
    shifts = torch.full((num_pages * page_size,), shift)
    return Slots(2 * num_pages * page_size, rows[0].contiguous(), rows[1].contiguous(), shifts)


SLOTS = {
    "one token": scattered(1, torch.tensor([5])),
    "two spans, two shifts": spans([40, 70], [12, -9]),
    "a span that does not move": spans([50, 33, 40], [0, 7, 0]),
    "short spans": spans([3, 1, 7, 31], [4, 4, -4, 0]),
    "short and long spans": spans([3, 64, 2, 45, 1], [1, 2, 3, 3, 0]),
    "one long span": spans([3000], [1021]),
    "scattered, one shift": scattered(77, torch.full((77,), -13)),
    "scattered, a shift each": scattered(77, torch.arange(77) - 30),
    "pages of 16": pages(5, 16, 48),
}
FAR = scattered(60, torch.tensor([MAX_TESTED_SHIFT, -MAX_TESTED_SHIFT, MAX_TESTED_SHIFT - 1] * 20, dtype=torch.int32))


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poison(buffer: Tensor, slots: Tensor) -> None:
    """Fill the rows `slots` with NaN, so that a value left unwritten shows."""
    bits = buffer.view(BITS[buffer.element_size()])
    bits[slots] = torch.full((1,), torch.nan).to(buffer.dtype).view(bits.dtype)


def bits_of(buffer: Tensor) -> Tensor:
    """The bytes of `buffer`, comparable with `torch.equal` whatever they hold."""
    return buffer.view(BITS[buffer.element_size()])


def aligned_heads(dim: int, dtype: torch.dtype) -> int:
    """The fewest heads of `dim` that make a row of whole 16 bytes, as the fused kernels want it."""
    return 16 // gcd(16, dim * dtype.itemsize)


def make_buffers(slots: Slots, dtype: torch.dtype, heads: int, dims: tuple[int, ...], layers: int) -> list[Tensor]:
    """A buffer of each layer for each of `dims`: keys, and values if there are two; target rows are poisoned."""
    buffers = [
        random_rows((slots.num_slots, heads, dim), dtype, seed=10 * layer + kind)
        for kind, dim in enumerate(dims)
        for layer in range(layers)
    ]
    for buffer in buffers:
        poison(buffer, slots.dst)
    return buffers


def check_splice(
    device: str,
    slots: Slots,
    dtype: torch.dtype,
    heads: int,
    dims: tuple[int, ...],
    rope: RopeParams,
    *,
    layers: int = 2,
    rope_offset: int = 0,
) -> None:
    """Splice and compare with float64; bytes outside the target rows must be what they were.

    `dims` are those of keys and values, or one number for latent rows.
    """
    buffers = make_buffers(slots, dtype, heads, dims, layers)
    before = [bits_of(buffer).clone() for buffer in buffers]
    buffers = [buffer.to(device) for buffer in buffers]
    keys, values = buffers[:layers], buffers[layers:]
    splice_rows(keys, values or None, *slots.on(device), rope.to(device), rope_offset=rope_offset)
    others = torch.ones(slots.num_slots, dtype=torch.bool)
    others[slots.dst] = False
    still = slots.shifts == 0
    rotary = slice(rope_offset, rope_offset + rope.rotary_dim)
    for index, (buffer, old) in enumerate(zip(buffers, before, strict=True)):
        bits = bits_of(buffer.cpu())
        new, donors = bits[slots.dst], old[slots.src]
        assert torch.equal(bits[others], old[others])
        assert torch.equal(new[still], donors[still])
        if index >= layers:
            assert torch.equal(new, donors)
            continue
        assert torch.equal(new[..., : rotary.start], donors[..., : rotary.start])
        assert torch.equal(new[..., rotary.stop :], donors[..., rotary.stop :])
        if not still.all():
            moved, exact = (rows.view(dtype)[~still][..., rotary] for rows in (new, donors))
            exact = exact_turn(exact, slots.shifts[~still], rope)
            assert relative_l2(moved, exact) <= ROTATE_REL_L2[dtype]


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
        return slots.thinned(8) if self.is_fused and self.device == "cpu" else slots

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
