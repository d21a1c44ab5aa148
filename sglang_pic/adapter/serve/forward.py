"""The hooks on SGLang's forward path: take the splices of a batch, execute them, run the gap prefill.

Owns the moments, not the work: `GapBatch` rewrites the batch, the splicer moves rows. The hooks are installed only
where the cache is, and every one is a single attribute test for a batch without runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sglang_pic.adapter.serve.cache import PicRadixCache
from sglang_pic.adapter.serve.gap_batch import GapBatch, build_gap_batch
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.runtime.views import PoolView

__all__ = ["hand_over", "install"]

_GAP_ATTRIBUTE = "pic_gap_batch"


class _Active:
    """The gap batch whose forward pass is running in this process; one at a time, as SGLang's scheduler runs them."""

    gap: GapBatch | None = None


def install(cache: PicRadixCache) -> None:
    """Register the hooks for `cache`; SGLang applies them when its registry is applied."""
    from sglang.srt.environ import envs
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def attach(forward_batch: Any, _cls: type, batch: Any, model_runner: Any, **_: object) -> Any:
        pending = [cache.take_pending(req) for req in batch.reqs] if batch.forward_mode.is_extend() else []
        if any(splice is not None for splice in pending):
            if any(_goes_by_place(req) for req in batch.reqs):
                cache.forgo(pending)
            else:
                hand_over(forward_batch, _layout(pending, batch, model_runner, forward_batch.input_ids.device))
        return forward_batch

    def forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        gap: GapBatch | None = getattr(forward_batch, _GAP_ATTRIBUTE, None)
        if gap is None:
            return original(runner, forward_batch, *args, **kwargs)
        delattr(forward_batch, _GAP_ATTRIBUTE)
        # NOTE: the locks go back once the copy is queued on this stream: whoever reuses a freed donor slot writes it
        # from a later forward pass on the same stream.
        try:
            cache.splicer.splice(gap.splice.src, gap.splice.dst, gap.splice.shifts)
            _flip(cache.splicer.view, gap.flipped)
        finally:
            cache.release_locks(gap.locks)
        with ExitStack() as stack:
            # The runner's static input buffers are sized for requests, not for virtual sequences.
            stack.enter_context(envs.SGLANG_EAGER_INPUT_NO_COPY.override(True))
            stack.enter_context(_eager_prefill(runner))
            stack.enter_context(gap.narrowed(forward_batch, runner))
            stack.enter_context(_activated(gap))
            return original(runner, forward_batch, *args, **kwargs)

    def logits_metadata(original: Callable[..., Any], cls: type, forward_batch: Any) -> Any:
        gap = _Active.gap
        return original(cls, forward_batch if gap is None else gap.per_request_view(forward_batch))

    def mla_method(original: Callable[..., Any], attention: Any, forward_batch: Any) -> Any:
        # The MHA paths of DeepSeek re-project a sequence's whole prefix; a gap batch has it in the pool already.
        return original(attention, forward_batch) if _Active.gap is None else AttnForwardMethod.MLA

    runner_module = "sglang.srt.model_executor"
    HookRegistry.register(f"{runner_module}.forward_batch_info.ForwardBatch.init_new", attach, HookType.AFTER)
    HookRegistry.register(f"{runner_module}.model_runner.ModelRunner.forward", forward, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.layers.logits_processor.LogitsMetadata.from_forward_batch", logits_metadata, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method",
        mla_method,
        HookType.AROUND,
    )


def hand_over(forward_batch: Any, gap: GapBatch) -> None:
    """Let the next forward pass over `forward_batch` execute `gap`."""
    setattr(forward_batch, _GAP_ATTRIBUTE, gap)


def _layout(pending: Sequence[PendingSplice | None], batch: Any, model_runner: Any, device: torch.device) -> GapBatch:
    req_to_token = model_runner.req_to_token_pool.req_to_token
    return build_gap_batch(
        pending,
        batch.prefix_lens,
        batch.extend_lens,
        batch.extend_logprob_start_lens,
        [req_to_token[req.kv.req_pool_idx] for req in batch.reqs],
        device,
    )


def _goes_by_place(req: Any) -> bool:
    """Whether SGLang brings or takes something of a request by its tokens' places in the whole batch."""
    return bool(req.input_embeds is not None or req.positional_embed_overrides is not None or req.return_hidden_states)


def _flip(view: PoolView, slots: torch.Tensor | None) -> None:
    """The corruption of a test, where it asks for one: every number of the rows changes its sign."""
    for buffer in (*view.keys, *view.values) if slots is not None else ():
        buffer[slots] = -buffer[slots]


@contextmanager
def _activated(gap: GapBatch) -> Iterator[None]:
    _Active.gap = gap
    try:
        yield
    finally:
        _Active.gap = None


@contextmanager
def _eager_prefill(runner: Any) -> Iterator[None]:
    """Run eagerly and, with FlashInfer, over paged KV: the captured and ragged paths assume whole extends."""
    captured = runner.prefill_cuda_graph_runner
    backend = getattr(runner.attn_backend, "prefill_backend", runner.attn_backend)
    paged = getattr(backend, "use_paged", None)
    runner.prefill_cuda_graph_runner = None
    if paged is not None:
        backend.use_paged = True
    try:
        yield
    finally:
        runner.prefill_cuda_graph_runner = captured
        if paged is not None:
            backend.use_paged = paged
