"""Passes without a request under DP attention, where ranks gather tokens: every rank runs the same pass together."""

from __future__ import annotations

from typing import Any

import torch

from sglang_pic.adapter.sglang.seams import ForwardBatch


def gathers() -> bool:
    """Whether ranks exchange how many tokens each of them computes, before every pass."""
    from sglang.srt.utils.common import require_mlp_sync

    return bool(require_mlp_sync())


def set_token_counts(forward_batch: ForwardBatch, num_tokens: int) -> None:
    """Set on a batch made by hand that every rank computes `num_tokens` tokens; does nothing unless ranks gather."""
    if not gathers():
        return
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils.common import require_mlp_tp_gather

    batch: Any = forward_batch
    num_ranks = get_parallel().num_dp_ranks if require_mlp_tp_gather() else 1

    def alike(number: int) -> tuple[list[int], torch.Tensor]:
        return [number] * num_ranks, torch.full((num_ranks,), number, dtype=torch.int64, device=batch.input_ids.device)

    batch.global_num_tokens_cpu, batch.global_num_tokens_gpu = alike(num_tokens)
    batch.original_global_num_tokens_cpu = batch.global_num_tokens_cpu
    # The logits are those of each sequence's last token.
    batch.global_num_tokens_for_logprob_cpu, batch.global_num_tokens_for_logprob_gpu = alike(batch.batch_size)
    batch.is_extend_in_batch = True
    # As if every rank had voted for its graph; SGLang checks again whether a graph can take this pass.
    graphs = (Backend.BREAKABLE, Backend.FULL)
    batch.can_run_dp_prefill_cuda_graph = any(check_cuda_graph_backend(Phase.PREFILL, graph) for graph in graphs)
