"""Splice of index keys: each key is rotated by a shift and quantised with a scale of its own.

For every layer and token `i`, with `R(s)` the rotation of the first `rotary_dim` dimensions by `s` positions and `H`
the Hadamard transform, or nothing where the model has none:

    key = H R(shifts[i]) H (q[src[i]] * scale[src[i]])
    scale[dst[i]] = max |key| / 448        q[dst[i]] = FP8(key / scale[dst[i]])
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .backend import Backend, Choice, choose_backend
from .coverage import refusal
from .index_pages import KEY_DIM, PAGE_BYTES, PAGE_TOKENS
from .layers import LayerBuffers
from .operands import check_indices, check_rope, check_source
from .rope_params import RopeParams
from .slots import guard_slots


def splice_index(
    pages: Sequence[Tensor],
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    rope: RopeParams,
    *,
    is_mixed: bool,
    source: LayerBuffers | None = None,
) -> None:
    """Copy index keys between slots, rotated by each token's shift; in place.

    Float32 arithmetic, each number rounded once; with shift 0 key and scale are copied bit for bit. Slots are checked
    on a CPU and the caller's promise on a device. Where the fused kernel does not run it is plain torch, which waits
    for nothing.

    Args:
        pages: per layer `[num_pages, 1, PAGE_BYTES]` FP8, see `index_pages`; written in place. With a `LayerBuffers` no
            call repeats the checks or builds the table of addresses.
        src: `[n]` int64 slots to read.
        dst: `[n]` int64 slots to write: each once, none of them in `src`.
        shifts: `[n]` int32 or int64, target position minus source position.
        rope: the rotation of the keys' first dimensions, on the buffers' device.
        is_mixed: whether the stored keys went through the Hadamard transform.
        source: keys are read from these pages instead, of the same layers; pinned host memory will do for pages on a
            device.

    Raises:
        TypeError: a dtype outside the contract.
        ValueError: shapes, devices or slots outside the contract; nothing has been written.
    """
    buffers = LayerBuffers.of("pages", pages)
    check_pages(buffers, rope)
    check_indices(src, dst, shifts, buffers.device)
    if source is not None:
        check_source(source, buffers)
    if not src.numel():
        return
    num_sources = None if source is None else PAGE_TOKENS * source[0].shape[0]
    guard_slots(src, dst, PAGE_TOKENS * buffers[0].shape[0], num_sources)
    if choose_index(buffers, rope).backend is Backend.TRITON:
        from . import triton_index

        triton_index.splice_index(buffers, src, dst, shifts, rope, is_mixed=is_mixed, source=source)
    elif source is not None and source.device != buffers.device:
        raise ValueError("keys in host memory are read by the fused kernel only, which does not cover these operands.")
    else:
        reference.splice_index(buffers, src, dst, shifts, rope, is_mixed=is_mixed, source=source)


def check_pages(pages: LayerBuffers, rope: RopeParams) -> None:
    """Check that pages have the layout of `index_pages`, and that the rotation fits their keys.

    Raises:
        TypeError: pages are not FP8.
        ValueError: a shape or a rotation outside the contract.
    """
    if pages.dtype != torch.float8_e4m3fn:
        raise TypeError(f"pages.dtype={pages.dtype!r}: must be torch.float8_e4m3fn.")
    if pages[0].shape[1:] != (1, PAGE_BYTES):
        raise ValueError(f"pages have shape {tuple(pages[0].shape)!r}: must be [num_pages, 1, {PAGE_BYTES}].")
    if rope.rotary_dim & (rope.rotary_dim - 1):
        raise ValueError(f"rotary_dim={rope.rotary_dim!r}: must be a power of two.")
    check_rope(rope, 0, KEY_DIM, pages.device)


def choose_index(pages: LayerBuffers, rope: RopeParams) -> Choice:
    """The implementation that `splice_index` takes for these operands, and why it is not the fused kernel.

    Raises:
        ValueError: `SGLANG_PIC_KERNELS` names no implementation, or one that does not cover the operands.
    """
    return choose_backend(pages.device, lambda: refusal(pages, None, rope, 0))
