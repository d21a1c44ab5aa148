"""Owns what must hold before `bench-prefill` times anything: attention, then a gap prefill against a full one.

    attention    each backend against float32 on random rows, in virtual sequences over scattered slots
    gaps         a prompt whose runs come from its own rows at shift 0 gives the logits of its full prefill, as closely
                 as an exact prefix hit does; rows that nobody wrote are NaN, and rows of another prompt must be seen
    shift        keys that a splice moved, in the layer where they depend on the token alone, are those computed there

It must not know clocks or files. Random weights make a deep model amplify every rounding, so that the exact prefix hit
on the same weights is the measure, not a number of ours. The first layers are compared too, where rounding is small
and wrong rows stand out; whether they do is asked there only.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import torch
from pic_kernels.numerics import relative_l2
from torch import Tensor

from pic_bench.gpu_attention import AttentionBackend, AttentionShape
from pic_bench.gpu_cases import SHIFT, plant, random_tokens
from pic_bench.gpu_extend import Extend, gap_extend, whole_extend
from pic_bench.gpu_model import LatentPath, Pool, Skeleton
from sglang_pic.core import Plan
from sglang_pic.errors import BenchError
from sglang_pic.runtime.divergence import kl_and_differs

__all__ = ["Check", "attention_shapes", "check_attention", "check_model"]

# Operands are rounded to the dtype, and so are the weights before they meet the values.
_ATTENTION_REL_L2: Final = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Gaps beside a prefix hit on the same weights, and what they may be where that hit repeats the bits. All layers get
# more, for each makes the error of those before it larger; wrong rows are off by 0.3 to 1.
_TIMES_PREFIX_HIT: Final = 4.0
_ALL_LAYERS: Final = 5.0
_LOGITS_REL_L2: Final = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Both sides are rounded once: twice what the kernels' table allows one of them.
_MOVED_KEYS_REL_L2: Final = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
_SHALLOW: Final = 3
# By how much wrong rows must be further off than right ones in the first layers.
_TIMES_WRONG: Final = 3.0
_RUNS: Final = 4
_SHARE: Final = 0.8


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far one backend is from what is right; errors are relative L2, KL in nats."""

    model: str
    backend: str
    path: str
    layers: int
    """The model's first ones, with its head behind them."""
    tokens: int
    attention: float
    prefix_logits: float
    """An exact prefix hit against the full prefill."""
    gap_logits: float
    """Gaps with runs of the same prompt's own rows, at shift 0, against the full prefill."""
    prefix_kl: float
    gap_kl: float
    wrong_logits: float
    """The same with another prompt's rows: what the check would see."""
    moved_keys: float
    """Layer 0, keys spliced from another position against those computed there."""


def check_model(
    name: str, model: Skeleton, pool: Pool, backend: AttentionBackend, path: LatentPath, num_tokens: int
) -> list[Check]:
    """Compare the first layers, then all; the pool holds three times the tokens and `SHIFT`, and is poisoned after.

    Raises:
        BenchError: something is further off than it may be; the message says what.
    """
    attention = max(check_attention(backend, shape, model.device) for shape in attention_shapes(model, path))
    checks = []
    for part in dict.fromkeys((min(_SHALLOW, model.dims.layers), model.dims.layers)):
        check = _compare(name, model.first_layers(part), pool, backend, path, num_tokens, attention)
        _judge(check, model.dtype)
        checks.append(check)
    return checks


def attention_shapes(model: Skeleton, path: LatentPath) -> list[AttentionShape]:
    """What the passes of a path ask of a backend; a full prefill with a latent is expanded in any case."""
    dims = model.dims
    if not dims.latent:
        return [AttentionShape(dims.heads, dims.kv_heads, dims.qk_dim, dims.v_dim, dims.scale, 0, model.dtype)]
    shapes = [AttentionShape(dims.heads, dims.heads, dims.qk_dim, dims.v_dim, dims.scale, 0, model.dtype)]
    if path is LatentPath.ABSORBED:
        shapes.append(AttentionShape(dims.heads, 1, dims.row_dim, dims.latent, dims.scale, dims.latent, model.dtype))
    return shapes


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
    extend = Extend(positions, positions, row, row[positions], starts, ends, None)
    found = backend.plan(extend, row, shape)(query, keys, values)
    wide_keys = keys[row].float().repeat_interleave(shape.heads // shape.kv_heads, dim=1)
    wide_values = (keys[..., : shape.v_dim] if values is None else values)[row].float()
    wide_values = wide_values.repeat_interleave(shape.heads // shape.kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), wide_keys) * shape.scale
    hidden = torch.arange(len(row), device=device)[None, :] > positions[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    error = relative_l2(found, torch.einsum("hqk,khd->qhd", weights, wide_values))
    if not error <= _ATTENTION_REL_L2[shape.dtype]:
        raise BenchError(f"attention backend {backend.name}, {shape}: off by {error:.2g}; nothing was timed.")
    return error


def _compare(
    name: str,
    model: Skeleton,
    pool: Pool,
    backend: AttentionBackend,
    path: LatentPath,
    num_tokens: int,
    attention: float,
) -> Check:
    ids = random_tokens(np.random.default_rng(7), num_tokens, model.dims.vocab)
    slots = torch.randperm(3 * num_tokens + SHIFT, generator=torch.Generator().manual_seed(7)).to(model.device)
    own, other, far = slots[:num_tokens], slots[num_tokens : 2 * num_tokens], slots[2 * num_tokens :]
    tokens = torch.from_numpy(ids.astype(np.int64)).to(model.device)
    plan = _planted(ids, num_tokens, 0)
    pool.poison()
    # NOTE: the full prefill is the expanded one, whatever the path of the gaps.
    full = model.forward(whole_extend(tokens, own, 0), pool, backend)
    gaps = _gap_pass(tokens, other, plan, own)
    gap = model.forward(gaps, pool, backend, path)
    # NOTE: the same rows in another order would not do: attention does not see the order of rows.
    foreign = random_tokens(np.random.default_rng(9), num_tokens, model.dims.vocab)
    foreign_tokens = torch.from_numpy(foreign.astype(np.int64)).to(model.device)
    model.forward(whole_extend(foreign_tokens, far[:num_tokens], 0), pool, backend)
    wrong = model.forward(_gap_pass(tokens, other, plan, far), pool, backend, path)
    moved_keys = _moved_keys(model, pool, backend, path, ids, (own, other, far))
    # Last, for it writes rows of the donor again.
    prefix = model.forward(whole_extend(tokens, own, num_tokens - gaps.num_tokens), pool, backend, path)
    pool.poison()
    return Check(
        model=name,
        backend=backend.name,
        path=path.value if model.dims.latent else "",
        layers=len(model.layers),
        tokens=num_tokens,
        attention=attention,
        prefix_logits=relative_l2(prefix, full),
        gap_logits=relative_l2(gap, full),
        prefix_kl=float(kl_and_differs(full, prefix)[0]),
        gap_kl=float(kl_and_differs(full, gap)[0]),
        wrong_logits=relative_l2(wrong, full),
        moved_keys=moved_keys,
    )


def _moved_keys(
    model: Skeleton,
    pool: Pool,
    backend: AttentionBackend,
    path: LatentPath,
    ids: np.ndarray,
    slots: tuple[Tensor, Tensor, Tensor],
) -> float:
    own, other, far = slots
    later = np.concatenate((random_tokens(np.random.default_rng(8), SHIFT, model.dims.vocab), ids))
    tokens, later_tokens = (torch.from_numpy(part.astype(np.int64)).to(model.device) for part in (ids, later))
    model.forward(whole_extend(later_tokens, far, 0), pool, backend)
    plan = _planted(later, len(ids), SHIFT)
    model.forward(_gap_pass(tokens, other, plan, far), pool, backend, path)
    first, end = model.dims.latent, model.dims.row_dim
    spliced = torch.cat([torch.arange(run.target_start, run.target_end) for run in plan.runs]).to(model.device)
    return relative_l2(pool.keys[0][other[spliced]][..., first:end], pool.keys[0][own[spliced]][..., first:end].float())


def _planted(donor: np.ndarray, num_tokens: int, shift: int) -> Plan:
    planted = plant(donor, num_tokens, shift, _SHARE, _RUNS)
    if planted.plan is None:
        raise BenchError(f"a check of {num_tokens} tokens is too short: {planted.reason}.")
    return planted.plan


def _gap_pass(tokens: Tensor, row: Tensor, plan: Plan, donor_row: Tensor) -> Extend:
    return gap_extend(tokens, row, plan, [donor_row[run.donor_start : run.donor_end] for run in plan.runs])


def _judge(check: Check, dtype: torch.dtype) -> None:
    least = _LOGITS_REL_L2[dtype] * (1.0 if check.layers <= _SHALLOW else _ALL_LAYERS)
    allowed = max(_TIMES_PREFIX_HIT * check.prefix_logits, least)
    where = f"{check.model}, {check.layers} layers, {check.backend} {check.path}".rstrip()
    if not check.gap_logits <= allowed:
        raise BenchError(f"{where}: gap prefill is off by {check.gap_logits:.2g}, allowed {allowed:.2g}; not timed.")
    if not check.moved_keys <= _MOVED_KEYS_REL_L2[dtype]:
        raise BenchError(f"{where}: moved keys are off by {check.moved_keys:.2g}; not timed.")
    seen = check.wrong_logits > _TIMES_WRONG * max(check.gap_logits, check.prefix_logits)
    if check.layers <= _SHALLOW and not seen:
        raise BenchError(
            f"{where}: rows of another prompt are off by {check.wrong_logits:.2g} only: not seen; not timed."
        )
