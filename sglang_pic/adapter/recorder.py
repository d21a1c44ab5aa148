"""Writes down what a request of an experiment computed: logits over the whole vocabulary, spliced spans, keys.

Owns the files of `testing.record_dir`, one `NAME.npz` per request that asks for it, complete when the request's answer
arrives. Only a server under test has it. It must not change what is computed.

    logits   [num_positions, vocab_size] float32   from the first position whose logprob was asked for, or the last one
    spliced  [num_spans, 2] int64                  half-open spans of the prompt whose rows were spliced
    keys     [num_layers, num_tokens, width] float32, where the request asks for them: the row of each prompt token as
             the pool holds it; for MLA the latent and the rotary part
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_pic.adapter.serve.options import TestingOptions
from sglang_pic.runtime.views import PoolView

__all__ = ["install"]

logger = logging.getLogger(__name__)

_ATTRIBUTE = "pic_recording"


@dataclass(slots=True)
class _Recording:
    """One request of a batch of its own, while its forward pass runs."""

    req: Any
    logits: list[torch.Tensor] = field(default_factory=list)


class _Active:
    """The recording whose forward pass is running in this process."""

    recording: _Recording | None = None


def install(view: PoolView, folder: Path, *, is_first_rank: bool) -> None:
    """Register the hooks; SGLang applies them when its registry is applied.

    Args:
        view: the pool whose keys are recorded.
        folder: where the files go; made if it is not there.
        is_first_rank: ranks compute the same logits, so only the first one writes; keys are those of its own heads.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    folder.mkdir(parents=True, exist_ok=True)

    def attach(forward_batch: Any, _cls: type, batch: Any, model_runner: Any, **_: object) -> Any:
        if is_first_rank and batch.forward_mode.is_extend():
            asking = [req for req in batch.reqs if req.pic.options.testing.record is not None]
            if asking and len(batch.reqs) == 1 and _ends_here(asking[0]):
                setattr(forward_batch, _ATTRIBUTE, _Recording(asking[0]))
            elif len(batch.reqs) > 1:
                for req in asking:
                    logger.warning("sglang_pic: request %s shares its batch and is not recorded", req.rid)
        return forward_batch

    def forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        recording: _Recording | None = getattr(forward_batch, _ATTRIBUTE, None)
        if recording is None:
            return original(runner, forward_batch, *args, **kwargs)
        delattr(forward_batch, _ATTRIBUTE)
        _Active.recording = recording
        try:
            result = original(runner, forward_batch, *args, **kwargs)
        finally:
            _Active.recording = None
        _write(recording, view, runner.req_to_token_pool.req_to_token, folder)
        return result

    def keep(logits: torch.Tensor, _processor: Any, *_args: object, **_kwargs: object) -> torch.Tensor:
        if _Active.recording is not None:
            _Active.recording.logits.append(logits.detach().to(torch.float32).cpu().clone())
        return logits

    runner_module = "sglang.srt.model_executor"
    HookRegistry.register(f"{runner_module}.forward_batch_info.ForwardBatch.init_new", attach, HookType.AFTER)
    HookRegistry.register(f"{runner_module}.model_runner.ModelRunner.forward", forward, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.logits_processor.LogitsProcessor._get_logits", keep, HookType.AFTER)


def _ends_here(req: Any) -> bool:
    """Whether this pass computes the request's last prompt token; those before it, of a chunked prefill, do not."""
    return bool(req.extend_end == len(req.full_untruncated_fill_ids))


def _write(recording: _Recording, view: PoolView, req_to_token: torch.Tensor, folder: Path) -> None:
    req = recording.req
    testing: TestingOptions = req.pic.options.testing
    num_tokens = len(req.full_untruncated_fill_ids)
    arrays = {
        "logits": torch.cat(recording.logits).numpy(),
        "spliced": np.array(req.pic.spliced, dtype=np.int64).reshape(-1, 2),
    }
    if testing.record_keys:
        slots = req_to_token[req.kv.req_pool_idx, :num_tokens].to(torch.int64)
        rows = [buffer[slots].to(torch.float32).reshape(num_tokens, -1).cpu() for buffer in view.keys]
        arrays["keys"] = torch.stack(rows).numpy()
    assert testing.record is not None
    path = folder / f"{testing.record}.npz"
    # A reader that polls must never see half a file.
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, **arrays)  # type: ignore[arg-type]
    partial.replace(path)
