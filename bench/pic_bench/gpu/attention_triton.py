"""Extend attention over a paged pool as one Triton kernel: grouped-query, and with a latent that is its own value.

    out[t] = softmax(scale * q[t] k[slots[0 : p + 1]]) v[slots[0 : p + 1]]       p: the position of token t

It does the work of SGLang's extend kernel, which cannot be imported without SGLang, in the same way: a program holds a
block of queries and walks all keys before it through the row's slots, with no split over the keys. The query heads that
share a KV head lie in one block, so that a key is read once for all of them. Imports triton.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# NOTE: Triton infers the types in device functions; Python has none for them.

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from pic_bench.gpu.model import Attend, AttentionBackend, AttentionShape, Extend
from sglang_pic.errors import UnsupportedError

_IS_INTERPRETED: Final[bool] = bool(knobs.runtime.interpret)


def _launch(shape: AttentionShape) -> tuple[dict[str, Any], dict[str, int]]:
    """The compile-time parameters of the kernel by name, and the options of its launch.

    Blocks are chosen by the code that sm_90 gets (no spills), not yet by time on a device.
    """
    group, main = shape.heads // shape.kv_heads, shape.latent or shape.v_dim
    # With a latent 32 queries, as SGLang's kernel takes here: 64 of them do not fit the registers.
    tokens, keys, warps, stages = max(1, (32 if shape.latent else 128) // group), 32 if shape.latent else 64, 8, 2
    if _IS_INTERPRETED:
        # A block costs the interpreter the same whatever its size.
        tokens, keys, warps, stages = 32, 64, 4, 1
    constants: dict[str, Any] = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "GROUP": group}
    constants |= {"MAIN": main, "REST": shape.qk_dim - main, "V_DIM": shape.v_dim, "VALUE_IN_KEY": shape.latent > 0}
    constants |= {"PRECISION": "ieee" if shape.dtype == torch.float32 else "tf32", "BLOCK_T": tokens, "BLOCK_N": keys}
    return constants, {"num_warps": warps, "num_stages": stages}


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


def _plan(extend: Extend, slots: Tensor, shape: AttentionShape) -> Attend:
    constants, options = _launch(shape)
    if any(size & (size - 1) for size in (constants[name] for name in ("GROUP", "MAIN", "REST", "V_DIM"))):
        raise UnsupportedError(f"attention backend triton: {shape}: heads and widths must be powers of two.")
    tiles = torch.from_numpy(tile_queries(extend.prefix_lens, extend.seq_lens, constants["BLOCK_T"])).to(slots.device)
    scale = shape.scale * math.log2(math.e)

    def attend(query: Tensor, keys: Tensor, values: Tensor | None) -> Tensor:
        out = query.new_empty(query.shape[0], shape.heads, shape.v_dim)
        buffers = (query, keys, keys if values is None else values, out, slots, tiles)
        _extend_kernel[(len(tiles), shape.kv_heads)](*buffers, scale, **constants, **options)
        return out

    return attend


def compile_for(shape: AttentionShape, target: GPUTarget) -> CompiledKernel:
    """The kernel as a launch compiles it for bf16 rows on `target`; no device is needed, and no interpreter allowed."""
    constants, options = _launch(shape)
    run_time = [name for name in _extend_kernel.arg_names if name not in constants]
    kinds = {"slots": "*i64", "tiles": "*i32", "scale": "fp32"}
    signature = {name: kinds.get(name, "*bf16") for name in run_time} | dict.fromkeys(constants, "constexpr")
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(run_time) if name != "scale"}
    source = ASTSource(_extend_kernel, signature, constants, aligned)
    return triton.compile(source, target=target, options=options)


TRITON: Final = AttentionBackend("triton", _plan)


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
    K_DIM: tl.constexpr = MAIN + REST
    row = ((first + token) * HEADS + head * GROUP + lane % GROUP)[:, None]  # int64
    query = tl.load(q + row * K_DIM + tl.arange(0, MAIN)[None, :], mask=live, other=0.0)  # [BLOCK_T * GROUP, MAIN]
    query_rest = query
    if REST > 0:
        query_rest = tl.load(q + row * K_DIM + MAIN + tl.arange(0, REST)[None, :], mask=live, other=0.0)
    k += head * K_DIM
    v += head * V_DIM
    top = tl.full([BLOCK_T * GROUP], float("-inf"), tl.float32)
    total = tl.full([BLOCK_T * GROUP], 0.0, tl.float32)
    acc = tl.full([BLOCK_T * GROUP, V_DIM], 0.0, tl.float32)
    for start in range(0, position + count, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        there = at < position + count
        slot = tl.load(slots + at, mask=there, other=0).to(tl.int64)
        key = _rows(k, slot, there, KV_HEADS * K_DIM, MAIN)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if REST > 0:
            key_rest = _rows(k + MAIN, slot, there, KV_HEADS * K_DIM, REST)
            scores += tl.dot(query_rest, tl.trans(key_rest), input_precision=PRECISION)
        scores = tl.where(at[None, :] <= (position + token)[:, None], scores * scale, float("-inf"))
        # Key 0 is in the first block and every query sees it: `higher` is never -inf.
        higher = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weight, 1)
        value = key
        if not VALUE_IN_KEY:
            value = _rows(v, slot, there, KV_HEADS * V_DIM, V_DIM)
        acc = acc * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        top = higher
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + row * V_DIM + tl.arange(0, V_DIM)[None, :], result, mask=live)


@triton.jit
def _rows(base, slot, there, ROW: tl.constexpr, WIDTH: tl.constexpr):
    """`WIDTH` dimensions from `base` on of the rows in `slot`, `[BLOCK_N, WIDTH]`."""
    where = base + slot[:, None] * ROW + tl.arange(0, WIDTH)[None, :]
    # NOTE: `other=0`, for a slot that nobody wrote may hold NaN, and 0 * NaN is NaN.
    return tl.load(where, mask=there[:, None], other=0.0)
