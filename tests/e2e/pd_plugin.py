"""A plugin of SGLang for prefill and decode servers under test: a record of the rows, and which engine sends them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sglang_pic.runtime.live_pools import view_pool
from tests.e2e import plugins

ROWS_VARIABLE: Final = "PD_ROWS"
"""The folder that rows are written to."""


def environment(folder: Path, *more: str) -> dict[str, str]:
    """What a server is started with whose rows are written to `folder`, and which calls `more` when it starts."""
    return {**plugins.environment(f"{__name__}:register", *more), ROWS_VARIABLE: str(folder)}


def without_mooncake() -> None:
    """Have the platform send rows itself, also where Mooncake's package is installed."""
    sys.modules["mooncake"] = None  # type: ignore[assignment]


STAND_IN: Final = f"{__name__}:{without_mooncake.__name__}"


def register() -> None:
    """Write down the rows of requests."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    prefill = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin._send_kv_chunk"
    decode = "sglang.srt.disaggregation.decode.DecodeTransferQueue.pop_transferred"
    HookRegistry.register(prefill, _sent, HookType.BEFORE)
    HookRegistry.register(decode, _received, HookType.AFTER)


def _sent(scheduler: Any, req: Any, last_chunk: bool = False, end_idx: int | None = None) -> None:
    if last_chunk:
        _write(scheduler, req, "sent")


def _received(reqs: list[Any], queue: Any, *_: object) -> None:
    for req in reqs:
        _write(queue.scheduler, req, "received")


def _rows(runner: Any, slots: Any) -> Iterator[Any]:
    """What each layer has of a prompt's tokens, `[tokens, numbers]` in float64; of a window layer its last window."""
    view = view_pool(runner.token_to_kv_pool)
    for layer in range(view.num_layers):
        is_window = view.windows is not None and layer in view.windows.layers
        here = slots[-runner.sliding_window_size :] if is_window else slots
        index = view.read_index(layer, here)
        for rows in (*view.read(layer, here), *(() if index is None else (index,))):
            yield rows.flatten(1)


def _write(scheduler: Any, req: Any, name: str) -> None:
    import torch

    runner = scheduler.tp_worker.model_runner
    slots = runner.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(req.origin_input_ids)].long()
    kept = {
        "rows": list(_rows(runner, slots)),
        "spliced": [rows[:2] for rows in req.pic.spliced] if hasattr(req, "pic") else [],
        "prefix_len": req.prefix_len,
    }
    target = Path(os.environ[ROWS_VARIABLE]) / f"{req.bootstrap_room}.{name}"
    torch.save(kept, target.with_suffix(".part"))
    target.with_suffix(".part").rename(target)
