"""Work between two rounds of the scheduler, in passes that belong to no request: audits, and rows computed again.

A request that arrives meanwhile waits for one pass at most: of all workers one queues a pass in a round, and none does
before the pass that was queued last is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from sglang_pic.adapter.hooks import hook
from sglang_pic.adapter.seams import Scheduler
from sglang_pic.adapter.serve.fallback import Fallback


class Passes:
    """The passes of all workers of one scheduler rank, one after the other on SGLang's forward stream."""

    def __init__(self) -> None:
        self._event: Any = None  # of the pass that was queued last on the device

    def wait(self) -> bool:
        """Wait for the pass that was queued last; False if there is none, or it was waited for before."""
        event, self._event = self._event, None
        if event is not None:
            event.synchronize()
        return event is not None

    @contextmanager
    def queued(self, scheduler: Scheduler) -> Iterator[None]:
        """What the block computes is queued between the passes of two batches."""
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        # SGLang without overlap computes on the stream that it schedules on.
        with scheduler.forward_stream_ctx if scheduler.enable_overlap else nullcontext():
            yield
            self._event = scheduler.device_module.Event()
            self._event.record()
        # Slots that go back may be written anew from here on, and tensors reused.
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)


class Worker(ABC):
    """One kind of such work, on one scheduler rank; every rank does the same in the same round.

    Args:
        passes: shared with the other workers.
        fault: the reason that counts its exceptions.
    """

    def __init__(self, passes: Passes, fault: Fallback) -> None:
        self._passes, self._fault = passes, fault
        self.recover: Callable[..., None] | None = None
        """Notes a fault, as `PicRadixCache.recover` does. Until it is set, exceptions are raised."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step would do something on an idle server."""

    @abstractmethod
    def is_due(self, scheduler: Scheduler) -> bool:
        """Whether it is time for a step on a server that is not idle; called once after each round."""

    @abstractmethod
    def step(self, scheduler: Scheduler) -> None:
        """Queue the next pass, if anything is left to compute; the one before it is done."""

    @abstractmethod
    def abandon(self) -> None:
        """Drop what waits and wait for the running step, because rows or weights are about to change."""

    def renew(self) -> None:
        """The weights changed."""
        self.abandon()

    def step_if_idle(self, scheduler: Scheduler) -> bool:
        """Step where the scheduler has nothing to do, or wait for the pass that runs; whether it did either."""
        if not self.has_work or not scheduler.is_fully_idle():
            return False
        # NOTE: requests that came during a pass are served before another one is queued. The code does not ask whether
        # the pass has ended, because ranks would get different answers.
        with self.guarded(in_pass=True):
            if not self._passes.wait():
                self.step(scheduler)
        return True

    def step_if_due(self, scheduler: Scheduler) -> bool:
        """Step after a round, if it is time; whether it was."""
        if not self.is_due(scheduler):
            return False
        with self.guarded(in_pass=True):
            self._passes.wait()
            self.step(scheduler)
        return True

    @contextmanager
    def guarded(self, *, in_pass: bool = False) -> Iterator[None]:
        """Note an exception, and give up what waits: no answer depends on it."""
        try:
            yield
        except Exception as error:
            if self.recover is None:
                raise
            self.recover((), self._fault, error, in_pass=in_pass)
            self.abandon()


def install(workers: Sequence[Worker]) -> None:
    """Register the hooks, none where there are no workers; the first that has something to do in a round does it."""
    if not workers:
        return
    scheduler, components = "managers.scheduler.Scheduler", "managers.scheduler_components"
    weights = f"{components}.weight_updater.SchedulerWeightUpdaterManager"

    def on_idle(scheduler: Scheduler) -> None:
        any(worker.step_if_idle(scheduler) for worker in workers)

    def sleep(original: Callable[..., None], scheduler: Scheduler) -> None:
        if not any(worker.has_work for worker in workers):
            original(scheduler)

    def after_result(_: None, scheduler: Scheduler, *args: object, **kwargs: object) -> None:
        any(worker.step_if_due(scheduler) for worker in workers)

    def after_weights(*_: object, **__: object) -> None:
        for worker in workers:
            worker.renew()

    def before_weights(*_: object, **__: object) -> None:
        for worker in workers:
            worker.abandon()

    hook("before", f"{scheduler}.on_idle", on_idle)
    hook("around", f"{scheduler}.maybe_sleep_on_idle", sleep)
    hook("after", f"{scheduler}.process_batch_result", after_result)
    hook("after", f"{scheduler}.record_weight_version_change", after_weights)
    # NOTE: SGLang takes a server on which work waits for idle. From here on its weights are gone or being written.
    hook("before", f"{weights}.begin_weight_update", before_weights)
    hook("after", f"{weights}.end_weight_update", after_weights)
    hook("before", f"{weights}.release_memory_occupation", before_weights)


def may_queue(scheduler: Scheduler) -> bool:
    """Whether a pass may be queued behind a round on a server that is not idle: nobody waits to be computed."""
    # NOTE: with overlap the next pass has been launched. Where it has a grammar it is sampled after this round, and its
    # logits may be in the buffer that SGLang's captured graphs share, which a pass of ours would write over.
    launched = scheduler.result_queue if scheduler.enable_overlap else ()
    awaits_sampling = any(result.delay_sample_func is not None for _, result in launched)
    return not scheduler.waiting_queue and scheduler.chunked_req is None and not awaits_sampling
