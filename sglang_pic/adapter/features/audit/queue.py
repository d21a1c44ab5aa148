"""The prompts that wait for their full computation, and the one that is being computed.

The full computation runs as forward passes between two rounds of the scheduler. As a request it would be counted,
aborted and retracted with the users' requests, its chunks would go before every waiting request, and its row would be
published. Its slots count as evictable and go back when SGLang needs them, so that no request waits for them.

A request that arrives meanwhile waits for one pass at most: none is queued before the one before it is done.
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

# A prompt that lost its slots this often is given up.
_MAX_RESTARTS = 4
# Larger than the KL of two working distributions over any vocabulary; stands for a broken one.
_WORST_KL = 1000.0


@dataclass(slots=True, eq=False)
class Drawn:
    """A request that is to be audited."""

    namespace: Namespace
    generation: int
    window: Window
    """Which of the namespace's windows gets the verdict."""
    tokens: np.ndarray
    """The prompt, `[prompt_len]` int64."""
    logits: torch.Tensor
    """`[vocab_size]`, on the model's device: of the pass that computed the last prompt token."""
    lora_id: str | None = None
    """Its LoRA adapter."""
    full: PromptPass | None = None
    """The full computation, once it has begun."""
    num_restarts: int = 0
    measured: torch.Tensor | None = None
    """`[3]` float64, in host memory, readable once the last step is done: KL(full || spliced) in nats, whether the
    likeliest tokens differ, whether the full computation gave no distribution. `None` until that step is queued."""


class FullQueue:
    """The drawn requests of one scheduler rank, in order; the first one may have begun.

    Args:
        runner: SGLang's model runner.
        is_present: whether a drawn request's rows may still be served, so that its audit matters.
        skip: called with the reason when a request leaves the queue without being computed.
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
        """Slots that the computation holds."""
        full = self._waiting[0].full if self._waiting else None
        return 0 if full is None else len(full.slots)

    def add(self, drawn: Drawn) -> None:
        """Put a request behind the others."""
        self._waiting.append(drawn)

    def take_measured(self) -> Drawn | None:
        """The first request if its computation is done; it leaves the queue.

        Its last step must have been waited for.
        """
        return self._waiting.popleft() if self._waiting and self._waiting[0].measured is not None else None

    def step(self, scheduler: Scheduler) -> int:
        """Queue the next step on the forward stream; returns its tokens, 0 where nothing can be computed.

        Call `take_measured` before.
        """
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
        """Give the slots back and return their number; an unfinished computation begins anew later."""
        count = self.num_slots
        if count:
            first = self._waiting[0]
            assert first.full is not None
            self._runner.token_to_kv_pool_allocator.free(first.full.slots)
            first.full = None
            first.num_restarts += 1
        return count

    def abandon(self) -> int:
        """Drop every request, wait for the running step, and return how many requests there were."""
        self.wait()
        self.release_slots()
        count = len(self)
        self._waiting.clear()
        return count

    def wait(self) -> bool:
        """Wait for the pass that was queued last; False if there is none, or it was waited for before."""
        event, self._event = self._event, None
        if event is not None:
            event.synchronize()
        return event is not None

    @contextmanager
    def _queued(self, scheduler: Scheduler) -> Iterator[None]:
        """What the block computes is queued on SGLang's forward stream, between the passes of two batches."""
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        # SGLang without overlap computes on the stream that it schedules on.
        with scheduler.forward_stream_ctx if scheduler.enable_overlap else nullcontext():
            yield
            self._event = scheduler.device_module.Event()
            self._event.record()
        # Slots that go back may be written anew from here on, and tensors reused.
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)

    def _next(self, tree: Tree) -> Drawn | None:
        """The first request that can be computed, its slots taken."""
        while self._waiting:
            reason = self._obstacle(self._waiting[0], tree)
            if reason is None:
                return self._waiting[0]
            self.release_slots()
            self._waiting.popleft()
            self._skip(reason)
        return None

    def _obstacle(self, drawn: Drawn, tree: Tree) -> AuditSkip | None:
        """Why a request cannot be computed, or `None` once its computation has begun."""
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
    # NaN because of the splice is as bad as can be.
    kl = kl.nan_to_num(nan=_WORST_KL).clamp(0, _WORST_KL)
    is_broken = ~full.logsumexp(-1).isfinite()
    return torch.stack([kl, differs, is_broken.to(kl.dtype)])
