"""Gather-rotate-scatter in CPU memory.

The compiled loops of `host_native` do it in one pass, near the speed of a plain copy. Where they are switched off or
cannot be compiled, this file does it in torch, in blocks of tokens: a block is small enough that its scratch, which all
blocks and layers of a call share, stays in the cache between the element-wise passes. Tokens with shift 0 are copied,
never computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from . import host_native
from .layers import LayerBuffers, Source
from .rope_params import RopeParams

# Float32 scratch of one block: swept on a 2-core AVX-512 server from 128 KiB to 2 MiB (one thread, CPU time, bf16, rows
# of 384, 1,152 and 2,048 bytes, 2026-11); flat from 1 MiB on.
_SCRATCH_BYTES: Final = 1 << 20
# A scatter walks the words of a row, so wide ones are faster. NOTE: words are moved, never computed with: complex128
# is there for its 16 bytes.
_WORDS: Final = ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def move_rows(
    turned: LayerBuffers,
    copied: LayerBuffers | None,
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
    offset: int,
    source: Source | None = None,
) -> None:
    """See `dispatch.move_rows`; done on return."""
    native = host_native.load()
    if native is not None:
        native.move_rows(turned, copied, src, dst, shifts, rope, offset, source)
        return
    source = source or Source(turned, copied)
    if copied is not None and source.copied is not None:
        _copy_rows(source.copied, copied, src, dst)
    moved = shifts != 0
    if not moved.all():
        still = ~moved
        _copy_rows(source.turned, turned, src[still], dst[still])
        src, dst, shifts = src[moved], dst[moved], shifts[moved]
    if src.numel():
        _rotate_rows(source.turned, turned, src, dst, shifts, rope, offset)


def _copy_rows(source: LayerBuffers, buffers: LayerBuffers, src: Tensor, dst: Tensor) -> None:
    block_len = max(16, _SCRATCH_BYTES // buffers.row_bytes)
    scratch = torch.empty((min(block_len, src.numel()), buffers.row_bytes), dtype=torch.uint8)
    for held, buffer in zip(source, buffers, strict=True):
        held_words, words = _as_words(held, buffer), _as_words(buffer, held)
        for here, there in zip(src.split(block_len), dst.split(block_len), strict=True):
            rows = scratch[: here.numel()].view(words.dtype)
            words.index_copy_(0, there, torch.index_select(held_words, 0, here, out=rows))


def _rotate_rows(
    source: LayerBuffers,
    buffers: LayerBuffers,
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
    offset: int,
) -> None:
    _, heads, dim = buffers[0].shape
    block_len = max(16, _SCRATCH_BYTES // (4 * heads * rope.rotary_dim))
    longest = min(block_len, src.numel())
    scratch = torch.empty((longest, buffers.row_bytes), dtype=torch.uint8)
    wide, turned = torch.empty((2, longest, heads, rope.rotary_dim), dtype=torch.float32)
    blocks = list(zip(src.split(block_len), dst.split(block_len), _angles(shifts, rope, block_len), strict=True))
    for held, buffer in zip(source, buffers, strict=True):
        held_words, words = _as_words(held, buffer), _as_words(buffer, held)
        for here, there, angles in blocks:
            n = here.numel()
            rows = torch.index_select(held_words, 0, here, out=scratch[:n].view(words.dtype))
            part = rows.view(buffer.dtype).view(n, heads, dim)[..., offset : offset + rope.rotary_dim]
            wide[:n].copy_(part)
            _turn(wide[:n], angles, turned[:n], rope)
            if buffer.dtype == torch.float8_e4m3fn:
                limit = torch.finfo(buffer.dtype).max
                turned[:n].clamp_(-limit, limit)
            part.copy_(turned[:n])
            words.index_copy_(0, there, rows)


def _angles(shifts: Tensor, rope: RopeParams, block_len: int) -> Iterator[tuple[Tensor, ...]]:
    """Per block cosines and sines for NeoX pairs, their complex numbers for interleaved ones.

    They broadcast over `[num_tokens, heads, rotary_dim / 2]`.
    """
    distinct, inverse = shifts.unique(return_inverse=True)
    cos, sin = rope.cos_sin(distinct)
    tables = (cos, sin) if rope.is_neox_style else (torch.complex(cos, sin),)
    for which in inverse.split(block_len):
        is_one = len(distinct) == 1 or bool((which == which[0]).all())
        yield tuple(table[which[:1]] if is_one else table[which].unsqueeze(1) for table in tables)


def _turn(wide: Tensor, angles: tuple[Tensor, ...], out: Tensor, rope: RopeParams) -> None:
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


def _as_words(buffer: Tensor, other: Tensor) -> Tensor:
    """A contiguous `[n, heads, dim]` as `[n, words]` of the widest words that fit it and `other`, sharing memory."""
    flat = buffer.flatten(1)
    row_bytes = flat.shape[1] * flat.element_size()
    starts = [each.storage_offset() * each.element_size() for each in (buffer, other)]
    dtype = next(dtype for size, dtype in _WORDS if not (row_bytes % size or any(start % size for start in starts)))
    return flat.view(dtype)
