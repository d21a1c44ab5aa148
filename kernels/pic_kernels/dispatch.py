"""The move that both ops share: keys or latent rows are rotated, values copied. Chooses its implementation."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from . import eager, reference
from .backend import Backend, Choice, choose_backend
from .coverage import refusal
from .layers import LayerBuffers, Source
from .operands import check_indices, check_rope, check_source
from .rope_params import RopeParams
from .slots import guard_slots


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
    """Check the operands, then `row[dst] = row[src]` in every layer, one part of the `turned` rows rotated.

    Args:
        turned: keys or latent rows, whose dimensions `[offset, offset + rotary_dim)` are rotated.
        copied: values, of as many layers and slots; None where there are none.
        src: see `splice_mha`, as `dst`, `shifts` and `rope`.
        offset: first dimension of the rotary part.
        source: the buffers that `src` indexes, if not `turned` and `copied` themselves.
    """
    check_indices(src, dst, shifts, turned.device)
    check_rope(rope, offset, turned[0].shape[2], turned.device)
    if source is not None:
        check_source(source.turned, turned)
        if copied is not None:
            check_source(source.copied or (), copied)
    if not src.numel():
        return
    guard_slots(src, dst, turned[0].shape[0], None if source is None else source.turned[0].shape[0])
    backend, _ = choose(turned, copied, rope, offset)
    if backend is Backend.EAGER and source is not None and source.turned.device != turned.device:
        raise ValueError("rows in host memory are read by the fused kernel only, which does not cover these operands.")
    _implementation(backend).move_rows(turned, copied, src, dst, shifts, rope, offset, source)


def choose(turned: LayerBuffers, copied: LayerBuffers | None, rope: RopeParams, offset: int) -> Choice:
    """The implementation that `move_rows` takes for these operands."""
    return choose_backend(turned.device, lambda: refusal(turned, copied, rope, offset))


def _implementation(backend: Backend) -> ModuleType:
    if backend is Backend.TRITON:
        from . import triton_splice

        return triton_splice
    return eager if backend is Backend.EAGER else reference
