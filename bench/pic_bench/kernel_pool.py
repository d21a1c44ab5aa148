"""Owns the shapes of `bench-kernels`, a pool of each, and the ways to move its rows that are timed against another.

It must not know clocks, tables or files. Buffers are parts of one allocation, so that the plain copy moves as many
bytes of the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
import torch
from pic_kernels import Choice, LayerBuffers, RopeParams, choose_mha, choose_mla, reference, splice_mha, splice_mla
from pic_kernels.numerics import ROTATE_REL_L2, relative_l2
from torch import Tensor

from sglang_pic.errors import BenchError

__all__ = ["PAGE_SIZE", "ROW_SHAPES", "SHAPES", "SHIFT", "SLOT_ORDERS", "Pool", "Shape", "Window", "make_window"]

PAGE_SIZE: Final = 16
SHIFT: Final = 1_021
SLOT_ORDERS: Final = ("run", "pages", "scattered")
"""Slots that run on, pages of 16 in random order, single slots in random order."""
_FILL_BYTES: Final = 1 << 24


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV geometry of a model in bf16; `latent` is 0 where keys and values have buffers of their own."""

    layers: int
    heads: int
    dim: int
    rotary_dim: int
    latent: int = 0
    active_params: float = 0.0
    """Weights a token passes through, embeddings left out; 0 for a shape that is no model."""

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.heads * self.dim * 2 * (1 if self.latent else 2)


SHAPES: Final = {
    "SmolLM2-135M": Shape(layers=30, heads=3, dim=64, rotary_dim=64, active_params=1.06e8),
    "Llama-3.1-8B": Shape(layers=32, heads=8, dim=128, rotary_dim=128, active_params=6.98e9),
    "Qwen3-32B": Shape(layers=64, heads=8, dim=128, rotary_dim=128, active_params=3.12e10),
    "DeepSeek-V2-Lite": Shape(layers=27, heads=1, dim=576, rotary_dim=64, latent=512, active_params=2.4e9),
    "DeepSeek-V3": Shape(layers=61, heads=1, dim=576, rotary_dim=64, latent=512, active_params=3.7e10),
}
# Rows of one buffer by their bytes, for what a short row costs.
ROW_SHAPES: Final = {
    "rows of 64 B": Shape(layers=24, heads=1, dim=32, rotary_dim=32),
    "rows of 128 B": Shape(layers=24, heads=1, dim=64, rotary_dim=64),
    "rows of 256 B": Shape(layers=24, heads=1, dim=128, rotary_dim=128),
    "rows of 512 B": Shape(layers=24, heads=2, dim=128, rotary_dim=128),
}


class Window(NamedTuple):
    """Slots to read and to write, `[n]` int64, and where the plain copy of as many bytes starts."""

    src: Tensor
    dst: Tensor
    shifts: Tensor
    copy_from: int
    copy_to: int


class Pool:
    """The buffers of one shape, and the ops on them."""

    def __init__(self, shape: Shape, num_layers: int, num_slots: int, device: torch.device) -> None:
        """Allocate `num_layers` of the shape's layers, filled with normal values that repeat."""
        num_buffers = num_layers * (1 if shape.latent else 2)
        row = shape.heads * shape.dim
        self.shape, self.num_layers, self.device = shape, num_layers, device
        self.memory = torch.empty(num_buffers * num_slots * row, dtype=torch.bfloat16, device=device)
        fill = torch.randn(_FILL_BYTES // 2, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).to(device)
        for part in self.memory.split(fill.numel()):
            part.copy_(fill[: part.numel()])
        buffers = list(self.memory.view(num_buffers, num_slots, shape.heads, shape.dim).unbind(0))
        self.keys = LayerBuffers(buffers[:num_layers])
        self.values = LayerBuffers(buffers[num_layers:]) if not shape.latent else None
        half = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32, device=device)
        self.rope = RopeParams(1e4 ** -(half / shape.rotary_dim), shape.rotary_dim, is_neox_style=not shape.latent)
        self._fused_rope = _flashinfer_rope() if device.type == "cuda" else None
        self._table = torch.cat(self.rope.cos_sin(torch.arange(SHIFT + 1, device=device)), dim=1)

    @property
    def rope_name(self) -> str:
        """Whose RoPE `move_then_rope` applies."""
        return "torch" if self._fused_rope is None else "FlashInfer"

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all buffers."""
        return self.num_layers * self.shape.layer_bytes

    def choice(self) -> Choice:
        """The implementation that a call of the public wrapper takes."""
        if self.values is None:
            return choose_mla(self.keys, self.rope, rope_offset=self.shape.latent)
        return choose_mha(self.keys, self.values, self.rope)

    def splice(self, window: Window) -> None:
        """The op under test."""
        if self.values is None:
            splice_mla(self.keys, window.src, window.dst, window.shifts, self.rope, rope_offset=self.shape.latent)
        else:
            splice_mha(self.keys, self.values, window.src, window.dst, window.shifts, self.rope)

    def reference(self, window: Window) -> None:
        """The readable implementation."""
        if self.values is None:
            reference.splice_mla(
                self.keys, window.src, window.dst, window.shifts, self.rope, rope_offset=self.shape.latent
            )
        else:
            reference.splice_mha(self.keys, self.values, window.src, window.dst, window.shifts, self.rope)

    def copy(self, window: Window) -> None:
        """As many bytes, as one plain copy."""
        num_elements = window.src.numel() * self.token_bytes // 2
        target = self.memory[window.copy_to : window.copy_to + num_elements]
        target.copy_(self.memory[window.copy_from : window.copy_from + num_elements])

    def move_then_rope(self, window: Window) -> None:
        """What SGLang has: `move_kv_cache`'s copy of every buffer, then a RoPE over every layer's moved keys."""
        for buffer in (*self.keys, *(self.values or ())):
            buffer[window.dst] = buffer[window.src]
        cos, sin = (table.unsqueeze(1) for table in self.rope.cos_sin(window.shifts))
        for buffer in self.keys:
            rows = buffer[window.dst]
            part = rows[..., self.shape.latent : self.shape.latent + self.shape.rotary_dim]
            if self._fused_rope is None:
                part.copy_(_torch_rope(part, cos, sin, self.rope.is_neox_style))
            else:
                flat = part.flatten(1).contiguous()
                # NOTE: it turns queries too; one head of them is the least it takes.
                query, is_neox = flat[:, : self.shape.rotary_dim].clone(), self.rope.is_neox_style
                self._fused_rope(window.shifts, query, flat, self.shape.rotary_dim, self._table, is_neox=is_neox)
                part.copy_(flat.view_as(part))
            buffer[window.dst] = rows

    def check(self, window: Window, name: str) -> float:
        """Splice one window and compare it with the reference; the largest relative L2 of a layer's keys.

        Raises:
            BenchError: a key is off by more than the kernels' tolerance, or a copied byte differs.
        """
        n, worst = window.src.numel(), 0.0
        first, end = self.shape.latent, self.shape.latent + self.shape.rotary_dim
        before = [buffer[window.src] for buffer in (*self.keys, *(self.values or ()))]
        self.splice(window)
        slots = torch.arange(2 * n, device=self.device)
        for index, (buffer, old) in enumerate(zip((*self.keys, *(self.values or ())), before, strict=True)):
            new = buffer[window.dst]
            if index >= self.num_layers:
                exact = torch.equal(new, old)
            else:
                small = torch.cat((old, torch.zeros_like(old)))
                reference.splice_mla([small], slots[:n], slots[n:], window.shifts, self.rope, rope_offset=first)
                worst = max(worst, relative_l2(new[..., first:end], small[n:, :, first:end]))
                exact = torch.equal(new[..., :first], old[..., :first]) and torch.equal(new[..., end:], old[..., end:])
            if not exact:
                raise BenchError(f"{name}: bytes that are only copied differ in buffer {index}; nothing was timed.")
        if not worst <= ROTATE_REL_L2[torch.bfloat16]:
            raise BenchError(f"{name}: wrong keys, relative L2 {worst:.2g}; nothing was timed.")
        return worst


def make_window(pool: Pool, order: str, num_tokens: int, start: int) -> Window:
    """Source and target slots inside `[start, start + 4 * num_tokens)`, half of each half unused."""
    pair: list[Tensor] = []
    for at in (start, start + 2 * num_tokens):
        if order == "run":
            index = torch.arange(num_tokens)
        elif order == "pages":
            pages = torch.randperm(2 * num_tokens // PAGE_SIZE)[: num_tokens // PAGE_SIZE]
            index = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
        else:
            index = torch.randperm(2 * num_tokens)[:num_tokens]
        pair.append((index + at).to(pool.device))
    elements = pool.token_bytes // 2
    shifts = torch.full((num_tokens,), SHIFT, device=pool.device)
    src, dst = pair
    return Window(src, dst, shifts, start * elements, (start + 2 * num_tokens) * elements)


def _torch_rope(part: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    wide = part.float()
    if is_neox:
        a, b = wide.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(part.dtype)
    a, b = wide[..., 0::2], wide[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(part.dtype)


def _flashinfer_rope() -> Callable[..., None] | None:
    try:
        from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace
    except ImportError:
        return None
    return apply_rope_with_cos_sin_cache_inplace
