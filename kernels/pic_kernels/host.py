"""Gather-rotate-scatter in CPU memory, near the speed of a plain copy.

The compiled loops of `host_native` do it in one pass. Where they are switched off or cannot be compiled, this file does
it in torch. Long runs of slots are moved as slices, with no gather and no scatter; the others go through one index. A
block is small enough that its float32 scratch stays in the cache between the element-wise passes, and all layers of a
call share the scratch. Tokens with shift 0 are copied, never computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from . import host_native
from .layers import LayerBuffers
from .rope_params import RopeParams

__all__ = ["move_rows"]

# Swept on a 2-core AVX-512 server (one thread, CPU time, bf16, rows of 384, 1,152 and 2,048 bytes, 2026-11). A shorter
# run costs more in calls, as a block of its own, than it saves in gather and scatter; a rotated block makes more calls.
_MIN_COPY_SPAN_BYTES: Final = 96 << 10
_MIN_ROTATE_SPAN_BYTES: Final = 192 << 10
# Float32 scratch of one block, swept likewise from 128 KiB to 2 MiB: flat from 1 MiB on.
_SCRATCH_BYTES: Final = 1 << 20
# A scatter walks the words of a row, so wide ones are faster. NOTE: words are moved, never computed with: complex128
# is there for its 16 bytes.
_WORDS: Final = ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

_Rows: TypeAlias = slice | Tensor
_Angles: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    """Some tokens moved together.

    `angles` broadcast over `[num_tokens, heads, rotary_dim / 2]`: cosines and sines for NeoX pairs, their complex
    numbers for interleaved ones.
    """

    num_tokens: int
    src: _Rows
    dst: _Rows
    angles: _Angles | None = None


def move_rows(
    turned: LayerBuffers,
    copied: LayerBuffers | None,
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
    offset: int,
) -> None:
    """See `dispatch.move_rows`; done on return."""
    native = host_native.load()
    if native is not None:
        native.move_rows(turned, copied, src, dst, shifts, rope, offset)
        return
    if copied is not None:
        _copy_rows(copied, src, dst)
    moved = shifts != 0
    if not moved.all():
        still = ~moved
        _copy_rows(turned, src[still], dst[still])
        src, dst, shifts = src[moved], dst[moved], shifts[moved]
    if src.numel():
        _rotate_rows(turned, src, dst, shifts, rope, offset)


def _copy_rows(buffers: LayerBuffers, src: Tensor, dst: Tensor) -> None:
    block_len = max(16, _SCRATCH_BYTES // buffers.row_bytes)
    blocks = _plan(src, dst, torch.zeros_like(src), block_len, _MIN_COPY_SPAN_BYTES // buffers.row_bytes)
    rows = torch.empty((min(block_len, src.numel()), *buffers[0].shape[1:]), dtype=buffers.dtype)
    for buffer in buffers:
        for block in blocks:
            source = _load(buffer, block, rows)
            if isinstance(block.src, slice) and not isinstance(block.dst, slice):
                # A scatter refuses to read the memory it writes, disjoint or not.
                source = rows[: block.num_tokens].copy_(source)
            _store(buffer, block.dst, source)


def _rotate_rows(
    buffers: LayerBuffers, src: Tensor, dst: Tensor, shifts: Tensor, rope: RopeParams, offset: int
) -> None:
    heads, dim = buffers[0].shape[1:]
    block_len = max(16, _SCRATCH_BYTES // (4 * heads * rope.rotary_dim))
    plan = _plan(src, dst, shifts, block_len, _MIN_ROTATE_SPAN_BYTES // buffers.row_bytes)
    blocks = _with_angles(plan, shifts, rope)
    scratch = _Scratch.create(min(block_len, src.numel()), heads, dim, rope.rotary_dim, buffers.dtype)
    for buffer in buffers:
        for block in blocks:
            _rotate_block(buffer, block, scratch, rope, offset)


def _plan(src: Tensor, dst: Tensor, shifts: Tensor, block_len: int, min_span_len: int) -> list[_Block]:
    """Cut the tokens, in their order, into blocks of at most `block_len`.

    A span is a stretch whose source and target slots both run on and whose shift is one. Those of `min_span_len`
    and more become blocks of their own; what lies between two of them is cut regardless of spans.
    """
    n = src.numel()
    broken = ((src.diff() != 1) | (dst.diff() != 1) | (shifts.diff() != 0)).nonzero().flatten() + 1
    edges = torch.cat((broken.new_zeros(1), broken, broken.new_full((1,), n)))
    is_long = edges.diff() >= max(min_span_len, 16)
    blocks: list[_Block] = []
    done = 0
    for lo, hi in zip(edges[:-1][is_long].tolist(), edges[1:][is_long].tolist(), strict=True):
        blocks += _cut(src, dst, range(done, lo, block_len), lo)
        blocks += _cut(src, dst, range(lo, hi, block_len), hi)
        done = hi
    return blocks + _cut(src, dst, range(done, n, block_len), n)


def _cut(src: Tensor, dst: Tensor, starts: range, end: int) -> list[_Block]:
    """One block from each of `starts` up to the next, the last up to `end`."""
    return [
        _Block(stop - at, _rows(src[at:stop]), _rows(dst[at:stop]))
        for at, stop in ((at, min(at + starts.step, end)) for at in starts)
    ]


def _rows(index: Tensor) -> _Rows:
    """The slots as a slice if they run on, else as they are."""
    start = int(index[0])
    if int(index[-1]) - start == index.numel() - 1 and bool((index.diff() == 1).all()):
        return slice(start, start + index.numel())
    return index


def _with_angles(blocks: list[_Block], shifts: Tensor, rope: RopeParams) -> list[_Block]:
    """`blocks`, in the order of `shifts`, with the cosines and sines of their tokens."""
    distinct, inverse = shifts.unique(return_inverse=True)
    cos, sin = rope.cos_sin(distinct)
    tables = (cos, sin) if rope.is_neox_style else (torch.complex(cos, sin),)
    out: list[_Block] = []
    at = 0
    for block in blocks:
        which = inverse[at : at + block.num_tokens]
        first = int(which[0])
        if len(distinct) == 1 or bool((which == first).all()):
            angles = tuple(table[first] for table in tables)  # [rotary_dim / 2]
        else:
            angles = tuple(table[which].unsqueeze(1) for table in tables)  # [num_tokens, 1, rotary_dim / 2]
        out.append(_Block(block.num_tokens, block.src, block.dst, angles))
        at += block.num_tokens
    return out


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Room for one block, reused by every block and layer of a call."""

    wide: Tensor
    turned: Tensor
    rows: Tensor

    @classmethod
    def create(cls, num_tokens: int, heads: int, dim: int, rotary_dim: int, dtype: torch.dtype) -> _Scratch:
        wide = torch.empty((num_tokens, heads, rotary_dim), dtype=torch.float32)
        return cls(wide, torch.empty_like(wide), torch.empty((num_tokens, heads, dim), dtype=dtype))


def _rotate_block(buffer: Tensor, block: _Block, scratch: _Scratch, rope: RopeParams, offset: int) -> None:
    """Move one block of one layer: whole rows where something beside the rotary part exists, then that part."""
    assert block.angles is not None
    n = block.num_tokens
    part = slice(offset, offset + rope.rotary_dim)
    source = _load(buffer, block, scratch.rows)
    target = buffer[block.dst] if isinstance(block.dst, slice) else scratch.rows[:n]
    if rope.rotary_dim < buffer.shape[2] and target.data_ptr() != source.data_ptr():
        to_words, from_words = _as_words(target, source)
        to_words.copy_(from_words)
    wide, turned = scratch.wide[:n], scratch.turned[:n]
    wide.copy_(source[..., part])
    _turn(wide, block.angles, turned, rope)
    if buffer.dtype == torch.float8_e4m3fn:
        limit = torch.finfo(buffer.dtype).max
        turned.clamp_(-limit, limit)
    target[..., part].copy_(turned)
    if not isinstance(block.dst, slice):
        _store(buffer, block.dst, target)


def _load(buffer: Tensor, block: _Block, rows: Tensor) -> Tensor:
    """The source rows of `block`: in place if they are a slice, gathered into `rows` otherwise."""
    if isinstance(block.src, slice):
        return buffer[block.src]
    out = rows[: block.num_tokens]
    from_words, to_words = _as_words(buffer, out)
    torch.index_select(from_words, 0, block.src, out=to_words)
    return out


def _store(buffer: Tensor, dst: _Rows, rows: Tensor) -> None:
    if isinstance(dst, slice):
        to_words, from_words = _as_words(buffer[dst], rows)
        to_words.copy_(from_words)
    else:
        to_words, from_words = _as_words(buffer, rows)
        to_words.index_copy_(0, dst, from_words)


def _turn(wide: Tensor, angles: _Angles, out: Tensor, rope: RopeParams) -> None:
    """Write `wide`, `[n, heads, rotary_dim]`, turned by `angles` into `out`."""
    if rope.is_neox_style:
        cos, sin = angles
        half = rope.rotary_dim // 2
        a, b = wide[..., :half], wide[..., half:]
        torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=out[..., half:]).addcmul_(a, sin)
    else:
        # A pair is a complex number: one pass instead of four over every second element.
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
        torch.mul(pairs, angles[0], out=torch.view_as_complex(out.unflatten(-1, (-1, 2))))


def _as_words(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Two contiguous `[n, heads, dim]` as `[n, words]` of the widest words that fit both, sharing memory."""
    flat = left.flatten(1), right.flatten(1)
    row_bytes = flat[0].shape[1] * flat[0].element_size()
    starts = [each.storage_offset() * each.element_size() for each in flat]
    for size, dtype in _WORDS:
        if not any(each % size for each in (row_bytes, *starts)):
            return flat[0].view(dtype), flat[1].view(dtype)
    raise AssertionError("bytes always fit")
