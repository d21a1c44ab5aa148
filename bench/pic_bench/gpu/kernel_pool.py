"""A pool of KV rows of a model's shape, and the ways to move its rows.

Buffers are parts of one allocation, so that the plain copy moves as many bytes of the same memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import torch
from pic_kernels import Choice, LayerBuffers, RopeParams, choose_rows
from pic_kernels.numerics import ROTATE_REL_L2, relative_l2
from pic_kernels.reference.rotate import rotate_pairs
from torch import Tensor

from sglang_pic.errors import BenchError
from sglang_pic.runtime.rope import RopeGeometry
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.views import PoolKind, PoolView

PAGE_SIZE: Final = 16
SHIFT: Final = 1_021
_MAX_SHIFT: Final = 1 << 17
SLOT_ORDERS: Final = ("run", "pages", "scattered")
"""Slots that run on, pages of 16 in random order, single slots in random order."""
_FILL_BYTES: Final = 1 << 24
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV rows of a model; `latent` is 0 where keys and values have buffers of their own."""

    layers: int = 1
    heads: int
    dim: int
    rotary_dim: int
    is_neox: bool = True
    latent: int = 0
    rope_theta: float = 1e4

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token in one layer, in bf16."""
        return self.heads * self.dim * 2 * (1 if self.latent else 2)


_FILE: Final = Path(__file__).with_name("shapes.json").read_bytes()
_KINDS: Final = msgspec.json.decode(_FILE, type=dict[str, dict[str, Shape]])
SHAPES, PARTIAL, LAYOUTS = (_KINDS[kind] for kind in ("models", "partial", "layouts"))
"""Of models, of two whose rows turn in part only, and of every way in which rows may be laid out."""


class Window(NamedTuple):
    """Slots to read and to write, `[n]` int64, and where the plain copy of as many bytes starts."""

    src: Tensor
    dst: Tensor
    shifts: Tensor
    copy_from: int
    copy_to: int


class Pool:
    """The buffers of one shape, and the ops on them."""

    def __init__(
        self, shape: Shape, num_layers: int, num_slots: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """Allocate `num_layers` of the shape's layers; nothing is written."""
        num_buffers = num_layers * (1 if shape.latent else 2)
        self.shape, self.num_layers, self.device, self.dtype = shape, num_layers, device, dtype
        self.memory = torch.empty(num_buffers * num_slots * shape.heads * shape.dim, dtype=dtype, device=device)
        buffers = self.memory.view(num_buffers, num_slots, shape.heads, shape.dim).unbind(0)
        self.keys, self.values = buffers[:num_layers], buffers[num_layers:]
        self.bits = [buffer.view(_BITS[dtype.itemsize]) for buffer in buffers]
        """The keys' buffers and then the values', as integers."""
        self._turned = slice(shape.latent, shape.latent + shape.rotary_dim)
        half = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32, device=device)
        inv_freq = shape.rope_theta ** -(half / shape.rotary_dim)
        self.rope = RopeParams(inv_freq, shape.rotary_dim, is_neox_style=shape.is_neox)
        view = PoolView(
            kind=PoolKind.MLA if shape.latent else PoolKind.MHA,
            keys=self.keys,
            values=self.values,
            dtype=dtype,
            num_slots=num_slots,
            page_size=1,
            rope_offset=shape.latent,
            rope_dim=shape.dim - shape.latent,
            start_layer=0,
        )
        geometry = RopeGeometry(tuple(range(num_layers)), (self.rope,) * num_layers, _MAX_SHIFT)
        self.splice = Splicer(view, geometry).splice
        """The op under test, as a server calls it: `(src, dst, shifts)`."""

    def fill(self) -> None:
        """Write normal values that repeat."""
        fill = torch.randn(_FILL_BYTES // 2, generator=torch.Generator().manual_seed(0)).to(self.memory)
        for part in self.memory.split(fill.numel()):
            part.copy_(fill[: part.numel()])

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all buffers."""
        return self.num_layers * self.shape.layer_bytes

    def choice(self) -> Choice:
        """The implementation that a splice takes."""
        keys, values = LayerBuffers(self.keys), LayerBuffers(self.values) if self.values else None
        return choose_rows(keys, values, self.rope, rope_offset=self.shape.latent)

    def move(self, window: Window) -> None:
        """Splice a window."""
        self.splice(window.src, window.dst, window.shifts)

    def copy(self, window: Window) -> None:
        """As many bytes, as one plain copy."""
        num_elements = window.src.numel() * self.token_bytes // 2
        target = self.memory[window.copy_to : window.copy_to + num_elements]
        target.copy_(self.memory[window.copy_from : window.copy_from + num_elements])

    def move_then_rope(self, window: Window) -> None:
        """SGLang's way: `move_kv_cache`'s copy of every buffer, then torch's RoPE over every layer's moved keys."""
        for raw in self.bits:
            raw[window.dst] = raw[window.src]
        cos, sin = (table.unsqueeze(1) for table in self.rope.cos_sin(window.shifts))
        for buffer in self.keys:
            rows = buffer[window.dst]
            part = rows[..., self._turned]
            part.copy_(rotate_pairs(part.float(), cos, sin, is_neox=self.rope.is_neox_style))
            buffer[window.dst] = rows

    def check(self, window: Window) -> float:
        """Splice one window and compare it with the reference; the largest relative L2 of a layer's keys.

        Raises:
            BenchError: a key is off by more than the kernels' tolerance, or a copied byte differs.
        """
        worst, still = 0.0, window.shifts == 0
        before = [raw[window.src] for raw in self.bits]
        self.move(window)
        for index, (raw, old) in enumerate(zip(self.bits, before, strict=True)):
            new, has_turned = raw[window.dst], index < self.num_layers
            start, stop = (self._turned.start, self._turned.stop) if has_turned else (None, None)
            copied, copies = ((rows[..., :start], rows[..., stop:], rows[still]) for rows in (old, new))
            if not all(map(torch.equal, copied, copies)):
                raise BenchError(f"buffer {index}: bytes that are only copied differ; nothing was timed.")
            if has_turned:
                donors, moved = (rows[~still].view(self.dtype)[..., self._turned] for rows in (old, new))
                error = relative_l2(moved, exact_turn(donors, window.shifts[~still], self.rope))
                if not error <= (allowed := ROTATE_REL_L2[self.dtype]):
                    off = f"off by {error / allowed:.3g} times what is allowed"
                    raise BenchError(f"buffer {index}: wrong keys, {off}; nothing was timed.")
                worst = max(worst, error)
        return worst


def exact_turn(rows: Tensor, shifts: Tensor, rope: RopeParams) -> Tensor:
    """`rows` `[n, heads, rotary_dim]` turned in float64, as complex numbers: independent of the kernels."""
    rows64 = rows.to(torch.float64)
    angles = shifts.to(torch.float64)[:, None, None] * rope.inv_freq.to(torch.float64)
    rotation = torch.polar(torch.ones_like(angles), angles)
    if rope.is_neox_style:
        half = rope.rotary_dim // 2
        turned = torch.complex(rows64[..., :half].contiguous(), rows64[..., half:].contiguous()) * rotation
        return torch.cat((turned.real, turned.imag), dim=-1)
    return torch.view_as_real(torch.view_as_complex(rows64.unflatten(-1, (-1, 2)).contiguous()) * rotation).flatten(-2)


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
