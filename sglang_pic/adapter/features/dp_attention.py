"""DP attention: ranks serve different requests, and compute the layers behind attention together.

Before every pass ranks exchange how many tokens each computes, and size their buffers by that. So a batch is laid out,
and its rows are copied, before SGLang exchanges the numbers: a batch whose splice failed counts all its tokens. A later
fault ends the server, because a pass with another number of tokens would hang the other ranks or corrupt their results.

Each rank has a tree, an index, pins and faults of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch

from sglang_pic.adapter.features.parts import Parts
from sglang_pic.adapter.probe.gathered import gathers
from sglang_pic.adapter.sglang.hooks import hook
from sglang_pic.adapter.sglang.seams import BuildContext, ScheduleBatch


def make(_: BuildContext, parts: Parts) -> None:
    """Register the hooks of a server whose ranks gather tokens; SGLang applies them when its registry is applied."""
    path = parts.path
    if not gathers():
        return

    def exchange_gaps(
        original: Callable[..., ScheduleBatch | None], adapter: Any, local_batch: ScheduleBatch | None
    ) -> ScheduleBatch | None:
        if local_batch is None or not local_batch.forward_mode.is_extend():
            return original(adapter, local_batch)
        if not any(req.pic.pending for req in local_batch.reqs):
            return original(adapter, local_batch)
        with _on_forward_stream(adapter):
            computed = path.splice_ahead(local_batch, adapter.model_runner)
        if computed is None:
            return original(adapter, local_batch)
        whole = local_batch.extend_num_tokens
        local_batch.extend_num_tokens = computed
        try:
            return original(adapter, local_batch)
        finally:
            local_batch.extend_num_tokens = whole

    def vote(original: Callable[..., bool], *, local_batch: ScheduleBatch | None, **options: Any) -> bool:
        ahead = None if local_batch is None else path.ahead(local_batch)
        if ahead is None or ahead.gap is None:
            return original(local_batch=local_batch, **options)
        # NOTE: a rank that votes for the graph must replay it, so SGLang checks the narrowed batch.
        narrowed: Any = copy(local_batch)
        narrowed.prefix_lens, narrowed.batch_size = ahead.gap.prefix_lens, partial(len, ahead.gap.owners)
        return ahead.replays and original(local_batch=narrowed, **options)

    hook(__name__, "SchedulerDPAttnAdapter.prepare_mlp_sync_batch", exchange_gaps)
    hook(__name__, "_local_prefill_cuda_graph_vote", vote)


@contextmanager
def _on_forward_stream(adapter: Any) -> Iterator[None]:
    """Use the stream of the passes, after everything that the scheduler has queued on its own."""
    if not adapter.enable_overlap:
        yield  # SGLang computes on the stream that it schedules on
        return
    runner = adapter.model_runner
    module = torch.get_device_module(runner.device)
    runner.forward_stream.wait_stream(module.current_stream())
    with module.stream(runner.forward_stream):
        yield
