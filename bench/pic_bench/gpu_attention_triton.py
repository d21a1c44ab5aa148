"""Owns extend attention over a paged pool as one Triton kernel: grouped-query, and with a latent that is its own value.

    out[t] = softmax(scale * q[t] k[slots[0 : p + 1]]) v[slots[0 : p + 1]]       p: the position of token t

SGLang's own extend kernel is not importable where SGLang is not; this one does the same work the same way: a program
holds a block of queries and walks all keys before it through the row's slots, with no split over the keys. The query
heads that share a KV head lie in one block, so that a key is read once for all of them. Imports triton.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# NOTE: what device functions hold has no type of Python's; Triton infers it.

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from pic_bench.gpu_attention import Attend, AttentionShape
from pic_bench.gpu_extend import Extend
from sglang_pic.errors import UnsupportedError

__all__ = ["IS_INTERPRETED", "Tiling", "TritonAttention", "tile_queries", "tiling"]

IS_INTERPRETED: Final[bool] = bool(knobs.runtime.interpret)
"""Whether `TRITON_INTERPRET=1` was set when this module was imported."""


class Tiling(NamedTuple):
    """How the kernel is cut: a block is `tokens` times the query heads of a KV head, by `keys`."""

    tokens: int
    keys: int
    warps: int
    stages: int


def tiling(shape: AttentionShape) -> Tiling:
    """Blocks for a shape, chosen by the code that sm_90 gets (no spills), not yet by time on a device."""
    group = shape.heads // shape.kv_heads
    if IS_INTERPRETED:
        # A block costs the interpreter the same whatever its size.
        return Tiling(32, 64, 4, 1)
    if shape.latent:
        # 32 queries, as SGLang's kernel takes here: 64 of them do not fit the registers.
        return Tiling(max(1, 32 // group), 32, 8, 2)
    return Tiling(max(1, 128 // group), 64, 8, 2)


def tile_queries(prefix_lens: list[int], seq_lens: list[int], block: int) -> np.ndarray:
    """The blocks of a pass, `[num_tiles, 3]` int32: first token, number of tokens, position of the first.

    Those with most keys come first, so that the last programs to start are short ones.
    """
    tiles = []
    first = 0
    for prefix_len, seq_len in zip(prefix_lens, seq_lens, strict=True):
        num = seq_len - prefix_len
        starts = np.arange(0, num, block)
        tiles.append(np.stack((first + starts, np.minimum(block, num - starts), prefix_len + starts), axis=1))
        first += num
    table = np.concatenate(tiles).astype(np.int32)
    return table[np.argsort(-table[:, 2], kind="stable")]


class TritonAttention:
    """The kernel below as a backend."""

    name = "triton"

    def plan(self, extend: Extend, slots: Tensor | None, shape: AttentionShape) -> Attend:
        """See `AttentionBackend`.

        Raises:
            UnsupportedError: a number of heads or a width that is no power of two.
        """
        group = shape.heads // shape.kv_heads
        main = shape.latent or shape.v_dim
        rest = shape.qk_dim - main
        if any(size & (size - 1) for size in (group, main, rest, shape.v_dim)):
            raise UnsupportedError(f"attention backend triton: {shape}: heads and widths must be powers of two.")
        cut = tiling(shape)
        device = extend.row.device
        tiles = torch.from_numpy(tile_queries(extend.prefix_lens, extend.seq_lens, cut.tokens)).to(device)
        table = torch.arange(max(extend.seq_lens), device=device) if slots is None else slots

        def attend(query: Tensor, keys: Tensor, values: Tensor | None) -> Tensor:
            out = query.new_empty(query.shape[0], shape.heads, shape.v_dim)
            _extend_kernel[(len(tiles), shape.kv_heads)](
                query,
                keys,
                keys if values is None else values,
                out,
                table,
                tiles,
                shape.scale * math.log2(math.e),
                HEADS=shape.heads,
                KV_HEADS=shape.kv_heads,
                GROUP=group,
                MAIN=main,
                REST=rest,
                V_DIM=shape.v_dim,
                VALUE_IN_KEY=values is None,
                PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
                BLOCK_T=cut.tokens,
                BLOCK_N=cut.keys,
                num_warps=cut.warps,
                num_stages=cut.stages,
            )
            return out

        return attend


@triton.jit
def _extend_kernel(
    q,
    k,
    v,
    out,
    slots,
    tiles,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    V_DIM: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One block of queries of one KV head; a query is `MAIN` and, behind them, `REST` dimensions."""
    tile = tiles + tl.program_id(0) * 3
    head = tl.program_id(1)
    first, count, position = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    lane = tl.arange(0, BLOCK_T * GROUP)
    token = lane // GROUP
    live = (token < count)[:, None]
    row = ((first + token) * HEADS + head * GROUP + lane % GROUP)[:, None]  # int64
    main = tl.arange(0, MAIN)[None, :]
    query = tl.load(q + row * (MAIN + REST) + main, mask=live, other=0.0)  # [BLOCK_T * GROUP, MAIN]
    query_rest = query
    if REST > 0:
        rest = tl.arange(0, REST)[None, :]
        query_rest = tl.load(q + row * (MAIN + REST) + MAIN + rest, mask=live, other=0.0)
    k += head * (MAIN + REST)
    v += head * (MAIN + REST if VALUE_IN_KEY else V_DIM)
    top = tl.full([BLOCK_T * GROUP], float("-inf"), tl.float32)
    total = tl.full([BLOCK_T * GROUP], 0.0, tl.float32)
    acc = tl.full([BLOCK_T * GROUP, V_DIM], 0.0, tl.float32)
    # [0, seen) every query of the block sees, [seen, end) not all of them.
    end = position + count
    seen = position // BLOCK_N * BLOCK_N
    for start in range(0, seen, BLOCK_N):
        acc, top, total = _step(
            acc, top, total, query, query_rest, k, v, slots, start, end, position + token, scale,
            KV_HEADS, MAIN, REST, V_DIM, VALUE_IN_KEY, PRECISION, BLOCK_N, False,
        )  # fmt: skip
    for start in range(seen, end, BLOCK_N):
        acc, top, total = _step(
            acc, top, total, query, query_rest, k, v, slots, start, end, position + token, scale,
            KV_HEADS, MAIN, REST, V_DIM, VALUE_IN_KEY, PRECISION, BLOCK_N, True,
        )  # fmt: skip
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + row * V_DIM + tl.arange(0, V_DIM)[None, :], result, mask=live)


@triton.jit
def _step(
    acc,
    top,
    total,
    query,
    query_rest,
    k,
    v,
    slots,
    start,
    end,
    last,
    scale,
    KV_HEADS: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    V_DIM: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One block of keys; `last` is the position up to which each query sees."""
    at = start + tl.arange(0, BLOCK_N)
    there = (at < end)[:, None]
    slot = tl.load(slots + at, mask=at < end, other=0).to(tl.int64)[:, None]
    K_ROW: tl.constexpr = KV_HEADS * (MAIN + REST)
    key = _rows(k, slot, there, K_ROW, MAIN, MASKED)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if REST > 0:
        key_rest = _rows(k + MAIN, slot, there, K_ROW, REST, MASKED)
        scores += tl.dot(query_rest, tl.trans(key_rest), input_precision=PRECISION)
    scores *= scale
    if MASKED:
        scores = tl.where(at[None, :] <= last[:, None], scores, float("-inf"))
    # Key 0 is in the first block and every query sees it: `higher` is never -inf.
    higher = tl.maximum(top, tl.max(scores, 1))
    weight = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(top - higher)
    total = total * fade + tl.sum(weight, 1)
    value = key
    if not VALUE_IN_KEY:
        value = _rows(v, slot, there, KV_HEADS * V_DIM, V_DIM, MASKED)
    acc = acc * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
    return acc, higher, total


@triton.jit
def _rows(base, slot, there, ROW: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """`WIDTH` dimensions from `base` on of the rows in `slot`, `[BLOCK_N, WIDTH]`."""
    where = base + slot * ROW + tl.arange(0, WIDTH)[None, :]
    # NOTE: `other=0`, for a slot that nobody wrote may hold NaN, and 0 * NaN is NaN.
    return tl.load(where, mask=there, other=0.0) if MASKED else tl.load(where)
