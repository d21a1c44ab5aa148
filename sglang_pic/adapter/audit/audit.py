"""The live audit: some spliced requests are computed again in full, and what differs is watched.

Owns which requests are drawn, what is kept of them (the first token's logits over the whole vocabulary), when the full
computation may run and what follows from the comparison. SGLang's moments are in `audit_hooks.py`, the computation in
`audit_pass.py`, the windows and the switch in `audit_window.py`.

Not a request of SGLang's. A request of the scheduler's own would stand in its queues: it would be counted, aborted and
retracted with the users', a chunk of it would go before every request that waits, and its row would be published. A
forward pass between two rounds of the scheduler can do none of that. It runs when there is nothing else to run and, on
a server that is never idle, after every `_BUSY_INTERVAL` rounds of decoding in which nobody waited.

Its slots count as evictable, and SGLang gets them back when evicting the tree's rows was not enough. So they are in
SGLang's books at any time, and a request never waits for them.

Every rank draws the same requests, runs the same steps at the same rounds and hears the same verdict.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_pic.adapter.audit import metrics
from sglang_pic.adapter.audit.full_pass import FullPass, is_too_long, take_slots
from sglang_pic.adapter.audit.ledger import AuditLedger, AuditLimits
from sglang_pic.adapter.audit.metrics import AuditSkip
from sglang_pic.adapter.audit.report import (
    AuditReport,
    SuspendedNamespace,
    UndecidedNamespaces,
    log_resumption,
    log_suspension,
    log_undecided,
)
from sglang_pic.adapter.metrics import Series
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.probe.ranks import agree_on_largest
from sglang_pic.adapter.seams import Tree
from sglang_pic.adapter.serve.auditor import Auditor
from sglang_pic.adapter.serve.state import RequestState
from sglang_pic.config import PicConfig
from sglang_pic.runtime.divergence import kl_and_differs

__all__ = ["Audit"]

logger = logging.getLogger(__name__)

# Logits of spliced requests that wait: at most this many times a vocabulary of floats.
_MAX_PENDING = 16
# Rounds of decoding between two steps of an audit. At 256 tokens a step it adds the work of a prefill of 16 tokens to
# each round while an audit is due.
_BUSY_INTERVAL = 16
# More than two distributions over any vocabulary can differ by unless one of them is broken.
_WORST_KL = 1000.0
# Any would do, if it is the same on every rank.
_SEED = 0
# A prompt whose slots were needed this often is not computed.
_MAX_RESTARTS = 4


class _Drawn(NamedTuple):
    """A spliced request that is to be audited."""

    namespace: Namespace
    generation: int
    tokens: np.ndarray
    logits: torch.Tensor
    """`[vocab_size]`, on the model's device: of the pass that computed the last prompt token."""


@dataclass(slots=True)
class _Current:
    drawn: _Drawn
    full: FullPass | None = None
    num_restarts: int = 0


@dataclass(slots=True)
class _Tally:
    num_audited: int = 0
    num_agreed: int = 0
    num_skipped: int = 0
    sum_kl: float = 0.0


class Audit(Auditor):
    """The audit of one scheduler rank; made only where `audit_rate` is above 0.

    Args:
        runner: SGLang's model runner, from whose pool the full computation borrows slots.
        config: the operator's settings.
        series: exports this rank's `metrics.METRICS`.
        tp_group: SGLang's tensor-parallel group, or `None` for one rank.
    """

    def __init__(self, runner: Any, config: PicConfig, series: Series, tp_group: Any) -> None:
        self._runner, self._series, self._tp_group = runner, series, tp_group
        self._allocator = runner.token_to_kv_pool_allocator
        self._rate = config.audit_rate
        self._limits = AuditLimits(
            kl=config.audit_kl_limit, cap=config.audit_kl_cap, window=config.audit_window, least=config.audit_min
        )
        self._ledger = AuditLedger(self._limits)
        # NOTE: by chance, because every n-th request would be the same tenant's wherever tenants take turns.
        self._chance = random.Random(_SEED)
        self._pending: deque[_Drawn] = deque()
        self._current: _Current | None = None
        self._verdict: tuple[_Drawn, torch.Tensor] | None = None
        self._queued: Any = None
        self._tally = _Tally()
        self._has_warned = False
        self._num_rounds = 0

    # -- requests --------------------------------------------------------------------------------------------------

    def is_on(self, namespace: Namespace) -> bool:
        """Whether requests of `namespace` may be spliced."""
        return self._ledger.is_on(namespace)

    def generation(self, namespace: Namespace) -> int:
        """The generation that a new request of `namespace` belongs to."""
        return self._ledger.generation(namespace)

    def serves(self, state: RequestState) -> bool:
        """Whether a request that was received earlier may still be spliced, and be served rows that were."""
        # NOTE: a diverted request's rows are among those of requests that opted out, and generations are counted anew
        # after a flush: by then its own may be the present one.
        return not state.is_diverted and self._is_present(state.namespace, state.generation)

    def draw(self, req: Any) -> None:
        """Consider a request whose next pass has been admitted; the pass of its last prompt token decides."""
        state: RequestState = req.pic
        ends = req.extend_end == len(req.origin_input_ids) == len(req.full_untruncated_fill_ids)
        if not ends or not state.num_chunk_hit:
            return
        # NOTE: once for each spliced request and for nothing else, or ranks would draw different ones.
        state.is_drawn = self._chance.random() < self._rate

    def keep(self, req: Any, logits: torch.Tensor | None) -> None:
        """Keep what a drawn request's pass computed; `logits` `[vocab_size]` is copied on the current stream.

        `None` where the pass gave none.
        """
        state: RequestState = req.pic
        if logits is None:
            self._skip(AuditSkip.NO_LOGITS)
        elif is_too_long(self._allocator, len(req.origin_input_ids)):
            self._skip(AuditSkip.TOO_LONG)
        elif len(self._pending) >= _MAX_PENDING:
            self._skip(AuditSkip.QUEUE_FULL)
        elif self.serves(state):
            tokens = np.array(req.origin_input_ids, dtype=np.int64)
            self._pending.append(_Drawn(state.namespace, state.generation, tokens, logits.clone()))
        else:
            self._skip(AuditSkip.SUSPENDED)

    # -- the full computation --------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._pending) or self._current is not None or self._verdict is not None

    @property
    def num_slots(self) -> int:
        """Slots that it holds, which SGLang may have back."""
        return 0 if self._current is None or self._current.full is None else len(self._current.full.slots)

    def step_if_idle(self, scheduler: Any) -> None:
        """Run a step where the scheduler has nothing to do, or wait for the one that runs."""
        if not self.has_work or not scheduler.is_fully_idle():
            return
        if self._queued is not None:
            # NOTE: whoever comes meanwhile is served before another step is queued. Whether it has ended is not asked:
            # ranks would answer differently.
            self._wait()
        else:
            self._step(scheduler)

    def step_if_due(self, scheduler: Any, batch: Any) -> None:
        """Run a step between rounds of decoding, now and then, where no request waits to be computed."""
        if not self.has_work or not batch.forward_mode.is_decode():
            return
        self._num_rounds += 1
        nobody_waits = not scheduler.waiting_queue and scheduler.chunked_req is None
        if self._num_rounds >= _BUSY_INTERVAL and nobody_waits and not _awaits_sampling(scheduler):
            self._num_rounds = 0
            self._step(scheduler)

    def release_slots(self) -> int:
        """Give the slots back, as they are needed; the computation begins anew later. How many there were."""
        current, count = self._current, self.num_slots
        if current is None or current.full is None:
            return 0
        self._free(current.full)
        current.full = None
        current.num_restarts += 1
        return count

    def abandon(self) -> None:
        """Rows or weights are not those of the requests that wait: none of them is audited, and no pass still runs."""
        self._wait()
        self.release_slots()
        waiting = len(self._pending) + (self._current is not None) + (self._verdict is not None)
        self._skip(AuditSkip.FLUSHED, waiting)
        self._pending.clear()
        self._current = self._verdict = None

    def flush(self) -> None:
        """The tree was emptied: nothing of the time before can be served any more."""
        self.abandon()
        self._ledger.flush()
        self._watch_undecided()

    def renew(self) -> None:
        """The weights are others, whether or not the tree was emptied: what was audited says nothing of them."""
        self.abandon()
        self._ledger.clear_windows()
        self._watch_undecided()

    # -- the operator ----------------------------------------------------------------------------------------------

    def resume(self, number: int) -> bool:
        """Switch a namespace on again; whether `number` names one that is off, or is 0."""
        ended = self._ledger.resume(number)
        for suspension in ended:
            log_resumption(suspension)
        self._series.set(metrics.SUSPENDED, len(self._ledger.suspensions))
        return bool(ended) or number == 0

    def report(self) -> AuditReport:
        """What `/server_info` shows."""
        tally, undecided = self._tally, self._ledger.undecided
        return AuditReport(
            rate=self._rate,
            kl_limit=self._limits.kl,
            num_audited=tally.num_audited,
            num_agreed=tally.num_agreed,
            num_skipped=tally.num_skipped,
            num_pending=len(self._pending) + (self._current is not None) + (self._verdict is not None),
            mean_kl=tally.sum_kl / max(1, tally.num_audited),
            worst_window_kl=self._ledger.worst(),
            undecided=None
            if undecided is None
            else UndecidedNamespaces(is_above_limit=undecided.kl > self._limits.kl, **undecided._asdict()),
            suspended=[
                SuspendedNamespace(
                    number=number,
                    extra_key=namespace[0],
                    has_salt=namespace[1] is not None,
                    kl=kl,
                    num_audited=num_audited,
                    num_agreed=num_agreed,
                )
                for number, namespace, kl, num_audited, num_agreed in self._ledger.suspensions
            ],
        )

    # -- private ---------------------------------------------------------------------------------------------------

    def _step(self, scheduler: Any) -> None:
        # One step is queued at most: a request that arrives waits for no more than that.
        self._wait()
        self._settle()
        full = self._next(scheduler.tree_cache)
        if full is None:
            return
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        # SGLang without overlap computes on the stream that it schedules on.
        with scheduler.forward_stream_ctx if scheduler.enable_overlap else nullcontext():
            self._series.add(metrics.TOKENS, full.step())
            if full.is_complete:
                self._compare(full)
            self._queued = scheduler.device_module.Event()
            self._queued.record()
        # Slots that go back may be written anew from here on, and tensors reused.
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
        if full.is_complete:
            self._free(full)
            self._current = None

    def _wait(self) -> None:
        if self._queued is not None:
            self._queued.synchronize()
            self._queued = None

    def _is_present(self, namespace: Namespace, generation: int) -> bool:
        return self.is_on(namespace) and generation == self.generation(namespace)

    def _next(self, tree: Tree) -> FullPass | None:
        """The computation that goes on, or the next one that can begin."""
        while self._current is not None or self._pending:
            if self._current is None:
                self._current = _Current(self._pending.popleft())
            current = self._current
            if not self._is_present(current.drawn.namespace, current.drawn.generation):
                reason = AuditSkip.SUSPENDED
            elif current.full is not None:
                return current.full
            elif current.num_restarts >= _MAX_RESTARTS:
                reason = AuditSkip.PREEMPTED
            else:
                slots = take_slots(tree, len(current.drawn.tokens))
                if slots is not None:
                    current.full = FullPass(self._runner, current.drawn.tokens, slots)
                    return current.full
                reason = AuditSkip.MEMORY
            self.release_slots()
            self._current = None
            self._skip(reason)
        return None

    def _compare(self, full: FullPass) -> None:
        assert self._current is not None
        drawn = self._current.drawn
        kl, differs = kl_and_differs(full.logits, drawn.logits)
        # What is no number because of the splice is as bad as can be.
        kl = kl.nan_to_num(nan=_WORST_KL).clamp(0, _WORST_KL)
        is_broken = ~full.logits.logsumexp(-1).isfinite()
        self._verdict = (drawn, torch.stack([kl, differs, is_broken.to(kl.dtype)]))

    def _settle(self) -> None:
        if self._verdict is None:
            return
        drawn, measured = self._verdict
        self._verdict = None
        # NOTE: a rank that decided on its own would splice what another computes.
        kl, differs, is_broken = agree_on_largest(measured.cpu(), self._tp_group).tolist()
        if is_broken:
            self._skip(AuditSkip.FULL_NOT_FINITE)
            return
        agreed = not differs
        self._series.add(metrics.AUDITED, value=metrics.AGREE if agreed else metrics.DISAGREE)
        self._series.observe(metrics.KL, kl)
        self._tally.num_audited += 1
        self._tally.num_agreed += agreed
        self._tally.sum_kl += min(kl, self._limits.cap)
        logger.debug("sglang_pic: audited %d tokens: KL %.6f, agreed %s", len(drawn.tokens), kl, agreed)
        suspension = self._ledger.observe(drawn.namespace, drawn.generation, kl, agreed=agreed)
        if suspension is not None:
            self._series.set(metrics.SUSPENDED, len(self._ledger.suspensions))
            if self._is_first_rank:
                log_suspension(suspension, self._limits)
        self._watch_undecided()

    def _watch_undecided(self) -> None:
        """Say once that namespaces with too few audits of their own are too far off together."""
        undecided = self._ledger.undecided
        self._series.set(metrics.UNDECIDED_KL, 0.0 if undecided is None else undecided.kl)
        is_above = undecided is not None and undecided.kl > self._limits.kl
        if undecided is not None and is_above and not self._has_warned and self._is_first_rank:
            log_undecided(undecided, self._limits)
        # Until the mean is back within the limit, and passes it again.
        self._has_warned = is_above

    @property
    def _is_first_rank(self) -> bool:
        return self._tp_group is None or self._tp_group.rank_in_group == 0

    def _free(self, full: FullPass) -> None:
        self._allocator.free(full.slots)

    def _skip(self, reason: AuditSkip, count: int = 1) -> None:
        self._tally.num_skipped += count
        self._series.add(metrics.SKIPPED, count, value=reason.value)


def _awaits_sampling(scheduler: Any) -> bool:
    # NOTE: with overlap the next pass has been launched. Where it has a grammar it is sampled after this round, and its
    # logits may be in the buffer that SGLang's captured graphs share: a pass of ours would write over them.
    launched = scheduler.result_queue if scheduler.enable_overlap else ()
    return any(result.delay_sample_func is not None for _, result in launched)
