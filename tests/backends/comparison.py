"""One gap batch on one backend against dense attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

from sglang_pic.adapter.serve.prefill_path import prefill_path
from tests.backends.backends import make, ready
from tests.backends.cases import CASES, SHAPES, Comparison
from tests.backends.world import LAYERS, World


def compare(
    backend: str, shape: str, page_size: int, case: str, mutation: str | None = None, dtype: str = "float32"
) -> Comparison:
    """Run the gap batch of a case, then a decode pass; a `mutation` breaks the batch, and nothing is decoded."""
    with ready():
        world = World(CASES[case], SHAPES[shape], page_size, getattr(torch, dtype))
        attention = make(backend, world.runner)
        world.fill_pool(skip_runs=mutation == "stale_run")
        batch, gap, spans = world.whole_batch(), world.gap_batch(), world.spans()
        assert len(gap.owners) == len(spans)
        with prefill_path(world.runner, replays=False), gap.narrowed(batch, world.runner):
            if mutation is not None:
                _break(mutation, world, batch, spans)
            error = _run(world, attention, batch, spans)
            if world.shape.answer_window is not None:
                # Gaps of a request write to one place; on a GPU the first of them may come last.
                attention._pa_swa_prefill_lens[batch.req_pool_indices.flip(0)] = batch.seq_lens.flip(0).int()
        decode = world.decode_batch()
        last = [(i, request.end - 1, request.end) for i, request in enumerate(world.case.requests)]
        # NOTE: SGLang's Triton backend decodes with windows one key shorter than those it prefills with.
        unseen = int(backend == "triton")
        decode_error = 0.0 if mutation else _run(world, attention, decode, last, unseen=unseen)
    return Comparison(error, decode_error, len(spans))


def _run(world: World, attention: Any, batch: Any, spans: list[tuple[int, int, int]], *, unseen: int = 0) -> float:
    attention.init_forward_metadata(batch)
    shape, worst = world.shape, 0.0
    for layer in range(LAYERS):
        q, k, v = (
            torch.cat([true[i][layer, start:end] for i, start, end in spans])
            for true in (world.queries, world.keys, world.values)
        )
        arguments, options = (q.flatten(1), k, v), {}
        if shape.is_mla:
            latent, rotated = k[..., : shape.value_dim], k[..., shape.value_dim :]
            arguments = (q, k, latent)
            if world.runner.prefill_attention_backend_str in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
                # As SGLang's MLA layer calls the backends that take the two parts of query and key apart.
                arguments = (q[..., : shape.value_dim].contiguous(), latent, latent)
                options = {"q_rope": q[..., shape.value_dim :].contiguous(), "k_rope": rotated.contiguous()}
        if world.sinks is not None:
            options["sinks"] = world.sinks[layer]
        out = attention.forward(*arguments, world.layers[layer], batch, **options)
        expected = world.expected(layer, spans, unseen=unseen)
        difference = (out.double().view_as(expected) - expected).abs().max().item()
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return worst


def _break(mutation: str, world: World, batch: Any, spans: list[tuple[int, int, int]]) -> None:
    """Make a narrowed batch wrong in one way; `stale_run` has been done to the pool."""
    owners = [owner for owner, *_ in spans]
    victim = next(i for i, request in enumerate(world.case.requests) if request.runs)
    last = max(j for j, owner in enumerate(owners) if owner == victim)
    if mutation == "page_table":
        # The second page in the place of the first: rows of the same request, so that what is read is a number.
        row, size = world.rows.req_to_token[world.row_ids[victim]], world.page_size
        row[:size] = row[size] + torch.arange(size, dtype=row.dtype)
    elif mutation == "lost_prefix":
        _shift(batch, last, batch.extend_prefix_lens_cpu[last])
    elif mutation == "short_sequence":
        _shift(batch, last, 1)
    elif mutation == "swapped_owner":
        other = next(j for j, owner in enumerate(owners) if owner != victim)
        for rows in (batch.req_pool_indices, batch.req_pool_indices_cpu):
            rows[[last, other]] = rows[[other, last]]


def _shift(batch: Any, sequence: int, distance: int) -> None:
    """Have the new tokens of a virtual sequence begin so many positions too early."""
    for lens in (batch.seq_lens, batch.seq_lens_cpu, batch.extend_prefix_lens, batch.extend_prefix_lens_cpu):
        lens[sequence] -= distance
    batch.seq_lens_sum -= distance
