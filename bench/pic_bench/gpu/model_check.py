"""Is a decoder right, before it is timed? Its attention, a gap prefill beside an exact prefix hit, the rows that moved.

Attention equals float32 on random rows; a prompt whose runs come from its own rows at shift 0 gives the logits of its
full prefill, as closely as an exact prefix hit does; rows that nobody wrote are NaN, rows of another prompt must be
seen, and keys that a splice moved are those computed at their position. Random weights make a deep model amplify every
rounding, so the first layers are compared, where wrong rows stand out; the other layers are the same code.
"""

from __future__ import annotations

import copy
from typing import Final

import msgspec
import numpy as np
import torch
from pic_kernels.numerics import relative_l2
from torch import Tensor

from pic_bench.gpu.model import AttentionBackend, AttentionShape, Bench, Extend
from pic_bench.gpu.passes import Layout, gap_extend, make_lookup, random_tokens, whole_extend
from sglang_pic.errors import BenchError

# Operands are rounded to the dtype, and so are the weights before they meet the values.
_ATTENTION_REL_L2: Final = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Gaps beside a prefix hit on the same weights, and their bound where that hit repeats the bits; wrong rows are off by
# 0.3 to 1.
_TIMES_PREFIX_HIT: Final = 4.0
_LOGITS_REL_L2: Final = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Both sides are rounded once: twice what the kernels' table allows one of them.
_MOVED_KEYS_REL_L2: Final = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
_LAYERS: Final = 3
# By how much wrong rows must be further off than right ones.
_TIMES_WRONG: Final = 3.0


def check_model(bench: Bench, num_tokens: int) -> dict[str, float]:
    """Compare the first layers on a prompt of `num_tokens`; the pool holds four times as many.

    Returns:
        Relative L2 of `attention`, then of logits against those of the full prefill: of an exact prefix `hit`, of
        `gaps` with runs of the same prompt's own rows at shift 0, and of the gaps with another prompt's rows (`wrong`),
        which the check must see; of the `moved keys` of layer 0 against those computed at their position. `allowed` is
        what `gaps` may be.

    Raises:
        BenchError: something is further off than it may be; the message says what.
    """
    dims, pool, to_device = bench.dims, bench.pool, bench.to_device
    shapes = dims.attentions(bench.dtype)
    errors = {"attention": max(check_attention(bench.attention, shape, bench.device) for shape in shapes)}
    part = copy.copy(bench)
    part.layers = bench.layers[:_LAYERS]
    logits = part.forward
    rng = np.random.default_rng(7)
    lookup = make_lookup(rng, Layout.of_share(num_tokens, 0.8, 4), dims.vocab)
    foreign = random_tokens(rng, num_tokens, dims.vocab)
    own, other, far, _ = bench.slots.tensor_split((num_tokens, 2 * num_tokens, 2 * num_tokens + len(lookup.donor)))
    tokens, plan = to_device(lookup.prompt), lookup.plan()
    in_place = [msgspec.structs.replace(run, donor_start=run.target_start) for run in plan.runs]
    own_plan = msgspec.structs.replace(plan, runs=tuple(in_place))
    pool.poison()
    full = logits(whole_extend(tokens, own, 0))
    gap = logits(gap_extend(tokens, other, own_plan, own))
    # NOTE: the same rows in another order would not do: attention does not see the order of rows.
    logits(whole_extend(to_device(foreign), far[:num_tokens], 0))
    wrong = logits(gap_extend(tokens, other, own_plan, far))
    logits(whole_extend(to_device(lookup.donor), far, 0))
    logits(gap_extend(tokens, other, plan, far))
    moved = torch.cat([torch.arange(run.target_start, run.target_end) for run in plan.runs]).to(bench.device)
    turned = pool.keys[0][..., dims.latent :]
    moved_keys = relative_l2(turned[other[moved]], turned[own[moved]])
    # Last, for it writes rows of the donor again.
    prefix = logits(whole_extend(tokens, own, plan.num_spliced))
    errors |= {name: relative_l2(found, full) for name, found in (("hit", prefix), ("gaps", gap), ("wrong", wrong))}
    errors |= {"moved keys": moved_keys, "allowed": max(_TIMES_PREFIX_HIT * errors["hit"], _LOGITS_REL_L2[bench.dtype])}
    _judge(errors, f"{bench.name}, {len(part.layers)} layers, {bench.attention.name}", bench.dtype)
    return errors


def _judge(errors: dict[str, float], where: str, dtype: torch.dtype) -> None:
    gaps, allowed, moved_keys, wrong = (errors[name] for name in ("gaps", "allowed", "moved keys", "wrong"))
    if not gaps <= allowed:
        raise BenchError(f"{where}: gap prefill is off by {gaps:.2g}, allowed {allowed:.2g}; not timed.")
    if not moved_keys <= _MOVED_KEYS_REL_L2[dtype]:
        raise BenchError(f"{where}: moved keys are off by {moved_keys:.2g}; not timed.")
    if not wrong > _TIMES_WRONG * max(gaps, errors["hit"]):
        raise BenchError(f"{where}: rows of another prompt are off by {wrong:.2g} only, which is not seen; not timed.")


def check_attention(backend: AttentionBackend, shape: AttentionShape, device: torch.device) -> float:
    """Relative L2 against float32, over gaps of one token and of more than a block, behind short and long prefixes.

    Raises:
        BenchError: further off than the dtype allows, or not finite.
    """
    spans = [(0, 33), (40, 41), (64, 64 + 150), (400, 417)]
    random = torch.Generator(device).manual_seed(3)
    num_slots, num_new = 600, sum(end - start for start, end in spans)
    row = torch.randperm(num_slots, generator=torch.Generator().manual_seed(3))[:417].to(device)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float32, device=device).to(shape.dtype)

    query = draw(num_new, shape.heads, shape.qk_dim) * 3
    keys = draw(num_slots, shape.kv_heads, shape.qk_dim)
    values = None if shape.latent else draw(num_slots, shape.kv_heads, shape.v_dim)
    unused = torch.ones(num_slots, dtype=torch.bool, device=device).index_fill_(0, row, False)
    for buffer in (keys,) if values is None else (keys, values):
        buffer[unused] = float("nan")
    positions = torch.cat([torch.arange(*span, device=device) for span in spans])
    starts, ends = (list(bound) for bound in zip(*spans, strict=True))
    extend = Extend(positions, positions, row, row[positions], starts, ends)
    found = backend.plan(extend, row, shape)(query, keys, values)
    wide_keys, wide_values = (
        part[row].float().repeat_interleave(shape.heads // shape.kv_heads, dim=1)
        for part in (keys, keys[..., : shape.v_dim] if values is None else values)
    )
    scores = torch.einsum("qhd,khd->hqk", query.float(), wide_keys) * shape.scale
    hidden = torch.arange(len(row), device=device)[None, :] > positions[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    error = relative_l2(found, torch.einsum("hqk,khd->qhd", weights, wide_values))
    if not error <= _ATTENTION_REL_L2[shape.dtype]:
        raise BenchError(f"attention backend {backend.name}, {shape}: off by {error:.2g}; nothing was timed.")
    return error
