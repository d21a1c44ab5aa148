"""The prompts that wait for their full computation, and the one that is being computed.

The full computation runs as forward passes between two rounds of the scheduler. As a request it would be counted,
aborted and retracted like users' requests, its chunks would run before every waiting request, and its rows would be
published. Its slots count as evictable and are freed when SGLang needs them.

An arriving request waits for one pass at most: none is queued before the last one is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_pic.adapter.features.audit.audit_metrics import AuditSkip
from sglang_pic.adapter.features.audit.ledger import Window
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.probe.copies import to_host
from sglang_pic.adapter.probe.prompt_pass import PromptPass, has_adapter, take_slots
from sglang_pic.adapter.sglang.seams import ModelRunner, Scheduler, Tree
from sglang_pic.runtime.divergence import kl_and_differs

# A prompt that lost its slots this often is skipped.
_MAX_RESTARTS = 4
# The KL of a broken distribution: larger than that of two valid ones over any vocabulary.
_WORST_KL = 1000.0


@dataclass(slots=True, eq=False)
class Drawn:
    """A request drawn for an audit."""

    namespace: Namespace
    generation: int
    window: Window
    """The namespace's window that gets the verdict."""
    tokens: np.ndarray
    """The prompt, `[prompt_len]` int64."""
    logits: torch.Tensor
    """`[vocab_size]`, on the model's device, of the last prompt token."""
    lora_id: str | None = None
    """Its LoRA adapter."""
    full: PromptPass | None = None
    """The full computation, once it has begun."""
    num_restarts: int = 0
    measured: torch.Tensor | None = None
    """`[3]` float64, in host memory, readable when the last step is done: KL(full || spliced) in nats, whether the
    likeliest tokens differ, whether the full logits are not finite. `None` until that step is queued."""


class FullQueue:
    """The drawn requests of one scheduler rank, in order; the first one may have begun.

    Args:
        runner: SGLang's model runner.
        is_present: whether a drawn request's rows may still be served.
        skip: called with the reason when a request leaves the queue without an audit.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        is_present: Callable[[Drawn], bool],
        skip: Callable[[AuditSkip], None],
    ) -> None:
        self._runner, self._is_present, self._skip = runner, is_present, skip
        self._waiting: deque[Drawn] = deque()
        self._event: Any = None  # of the pass that was queued last on the device

    def __len__(self) -> int:
        """Requests without a verdict."""
        return len(self._waiting)

    @property
    def num_slots(self) -> int:
        """Slots of the computation."""
        full = self._waiting[0].full if self._waiting else None
        return 0 if full is None else len(full.slots)

    def add(self, drawn: Drawn) -> None:
        """Append a request."""
        self._waiting.append(drawn)

    def take_measured(self) -> Drawn | None:
        """Remove and return the first request if its last step was queued; `wait` before."""
        return self._waiting.popleft() if self._waiting and self._waiting[0].measured is not None else None

    def step(self, scheduler: Scheduler) -> int:
        """Queue the next step on the forward stream; returns its tokens, 0 if there is none. `take_measured` before."""
        drawn = self._next(scheduler.tree_cache)
        if drawn is None or drawn.full is None:
            return 0
        with self._queued(scheduler):
            num_tokens = drawn.full.step()
            if drawn.full.is_complete:
                drawn.measured = to_host(_compare(drawn.full.logits, drawn.logits))
        if drawn.measured is not None:
            self.release_slots()
        return num_tokens

    def release_slots(self) -> int:
        """Free the slots and return their number; an unfinished computation starts again later."""
        count = self.num_slots
        if count:
            first = self._waiting[0]
            assert first.full is not None
            self._runner.token_to_kv_pool_allocator.free(first.full.slots)
            first.full = None
            first.num_restarts += 1
        return count

    def abandon(self) -> int:
        """Wait for the running step, drop every request, and return their number."""
        self.wait()
        self.release_slots()
        count = len(self)
        self._waiting.clear()
        return count

    def wait(self) -> bool:
        """Wait for the last queued pass; False if there is none to wait for."""
        event, self._event = self._event, None
        if event is not None:
            event.synchronize()
        return event is not None

    @contextmanager
    def _queued(self, scheduler: Scheduler) -> Iterator[None]:
        """Queue the work of the block on SGLang's forward stream, between the passes of two batches."""
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        # SGLang without overlap computes on the stream that it schedules on.
        with scheduler.forward_stream_ctx if scheduler.enable_overlap else nullcontext():
            yield
            self._event = scheduler.device_module.Event()
            self._event.record()
        # From here on freed slots may be written, and tensors reused.
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)

    def _next(self, tree: Tree) -> Drawn | None:
        """The first request that can be computed, with its slots."""
        while self._waiting:
            reason = self._obstacle(self._waiting[0], tree)
            if reason is None:
                return self._waiting[0]
            self.release_slots()
            self._waiting.popleft()
            self._skip(reason)
        return None

    def _obstacle(self, drawn: Drawn, tree: Tree) -> AuditSkip | None:
        """Why a request cannot be computed, or `None`; begins its computation."""
        if not self._is_present(drawn):
            return AuditSkip.SUSPENDED
        if drawn.lora_id is not None and not has_adapter(self._runner.lora_manager, drawn.lora_id):
            return AuditSkip.ADAPTER
        if drawn.full is not None:
            return None
        if drawn.num_restarts >= _MAX_RESTARTS:
            return AuditSkip.PREEMPTED
        slots = take_slots(tree, len(drawn.tokens))
        if slots is None:
            return AuditSkip.MEMORY
        drawn.full = PromptPass(self._runner, drawn.tokens, slots, lora_id=drawn.lora_id)
        return None


def _compare(full: torch.Tensor, spliced: torch.Tensor) -> torch.Tensor:
    kl, differs = kl_and_differs(full, spliced)
    # NaN because of the splice counts as the worst KL.
    kl = kl.nan_to_num(nan=_WORST_KL).clamp(0, _WORST_KL)
    is_broken = ~full.logsumexp(-1).isfinite()
    return torch.stack([kl, differs, is_broken.to(kl.dtype)])
