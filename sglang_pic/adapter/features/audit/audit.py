"""The live audit: computes some requests on spliced rows in full, and switches splicing off if they differ too much.

`Audit` draws requests, runs steps of their full computation (`queue`, `PromptPass`) and applies the verdicts
(`ledger`). A step runs when the server is idle, or, on a server that is never idle, after `_BUSY_INTERVAL` rounds as
soon as no request waits.

Every rank draws the same requests, runs the same steps in the same rounds and gets the same verdicts.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from sglang_pic.adapter.features.audit import audit_metrics as metrics
from sglang_pic.adapter.features.audit.audit_metrics import AuditSkip
from sglang_pic.adapter.features.audit.ledger import AuditLedger, Window
from sglang_pic.adapter.features.audit.queue import Drawn, FullQueue
from sglang_pic.adapter.features.audit.report import (
    AuditReport,
    WindowReport,
    log_resumption,
    log_suspension,
)
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.probe.prompt_pass import is_too_long
from sglang_pic.adapter.probe.ranks import agree_on_largest
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Feature, PicTree
from sglang_pic.adapter.serve.state import RequestState
from sglang_pic.adapter.serve.stations import Stations
from sglang_pic.adapter.sglang.seams import ModelRunner, Req, RunnerOutput, ScheduleBatch, Scheduler, TpGroup

logger = logging.getLogger(__name__)

# Most drawn requests that wait, each with logits of a vocabulary of floats.
_MAX_PENDING = 16
# Rounds, of prefill or of decoding, between two steps of an audit. At 256 tokens a step this adds the work of a prefill
# of 16 tokens to each round while an audit waits.
_BUSY_INTERVAL = 16
# Any seed that is the same on every rank.
_SEED = 0


def is_drawn(state: RequestState) -> bool:
    """Whether the audit needs the logits of the last admitted chunk."""
    return state.drawn_chunk is state.last_chunk


@dataclass(slots=True)
class _Tally:
    num_audited: int = 0
    num_agreed: int = 0
    sum_kl: float = 0.0

    @property
    def mean_kl(self) -> float:
        return self.sum_kl / max(1, self.num_audited)


class Audit(Feature):
    """The audit of one scheduler rank, if `audit_rate` is above 0.

    Four methods drop state, each more than the one before: `make_room` the slots of an unfinished computation,
    `abandon` also the waiting requests, `on_weights` also the windows, `on_flush` also the generations.

    After new weights nothing is audited until the cache is flushed, if it had rows: a prompt's prefix, or that of a
    donor, may be of other weights than the full computation, and a difference would say nothing of the splice.

    Args:
        runner: SGLang's model runner, from whose pool the full computation borrows slots.
        stations: the operator's settings, the metrics, and what happens after exceptions.
        tp_group: SGLang's tensor-parallel group, or `None` for one rank.
        sends_rows: whether rows are sent to decode servers, which may keep spliced rows of a namespace that is off.
    """

    fault = Fallback.FAULT_AUDIT

    def __init__(
        self, runner: ModelRunner, stations: Stations, tp_group: TpGroup | None, *, sends_rows: bool = False
    ) -> None:
        self._config, self._recovery, self._tp_group = stations.config, stations.recovery, tp_group
        self._series, self._sends_rows = stations.series(metrics.METRICS), sends_rows
        self._allocator = runner.token_to_kv_pool_allocator
        self.ledger = AuditLedger(self._config)
        """Which namespaces are on."""
        self._queue = FullQueue(
            runner,
            is_present=lambda drawn: self._is_present(drawn.namespace, drawn.generation),
            skip=self._skip,
        )
        # NOTE: requests are drawn at random: if tenants take turns, every n-th one is the same tenant's.
        self._chance = random.Random(_SEED)
        self._tallies = {window: _Tally() for window in Window}
        self._series.set(metrics.LIMIT, self._config.audit_kl_limit)
        self._num_skipped = self._num_summed = 0
        self._num_rounds = 0
        # Since the last flush.
        self._has_rows = self._has_old_rows = False

    def on_received(self, state: RequestState) -> None:
        state.epoch = state.epoch._replace(generation=self.ledger.generation(state.namespace))
        if not self.ledger.is_on(state.namespace):
            state.diverted = Fallback.AUDIT

    def diverts(self, state: RequestState) -> Fallback | None:
        return None if self._is_present(state.namespace, state.epoch.generation) else Fallback.AUDIT

    def on_admitted(self, req: Req) -> None:
        """Draw the request for an audit, or not, if it uses spliced rows and its last prompt token is admitted."""
        state: RequestState = req.pic
        ends = req.extend_end == len(req.origin_input_ids) == len(req.full_untruncated_fill_ids)
        if not ends or req.retracted_stain or not (state.counts.chunk_hit or state.inherits):
            return
        with self._guarded():
            # NOTE: one number for each such request and for no other, so that all ranks draw the same requests.
            rate = self._config.audit_rate
            if _window_of(state) is Window.CHANGED:
                rate = max(rate, self._config.audit_change_rate)
            if self._chance.random() < rate:
                if state.media is not None:
                    self._skip(AuditSkip.MEDIA)
                elif self._has_old_rows:
                    self._skip(AuditSkip.WEIGHTS)
                else:
                    state.drawn_chunk = state.last_chunk

    def watch(self, batch: ScheduleBatch) -> Callable[[RunnerOutput], None] | None:
        """Find the drawn requests of a batch by their places in it, which are those of their logits."""
        self._has_rows = True
        drawn: list[tuple[int, Req]] = []
        for place, req in enumerate(batch.reqs):
            # Not the pass of another chunk of a drawn request.
            if is_drawn(req.pic) and not req.output_ids:
                req.pic.drawn_chunk = None
                drawn.append((place, req))

        def keep(output: RunnerOutput) -> None:
            # NOTE: sampling changes the logits in place, later on this stream. Scoring of several items gives none.
            logits = output.logits_output.next_token_logits
            for place, req in drawn:
                with self._guarded():
                    self._keep(req, None if logits is None else logits[place])

        return keep if drawn else None

    def _keep(self, req: Req, logits: torch.Tensor | None) -> None:
        """Queue a drawn request with the logits of its pass, `[vocab_size]`; `None` if the pass has none."""
        state: RequestState = req.pic
        if state.is_faulty:
            return  # it was computed whole
        if logits is None:
            self._skip(AuditSkip.NO_LOGITS)
        elif is_too_long(self._allocator, len(req.origin_input_ids)):
            self._skip(AuditSkip.TOO_LONG)
        elif len(self._queue) >= _MAX_PENDING:
            self._skip(AuditSkip.QUEUE_FULL)
        # NOTE: a diverted request has rows in the lane of requests that opted out. Its generation does not show this,
        # because a flush resets generations.
        elif state.diverted is None and self._is_present(state.namespace, state.epoch.generation):
            tokens = np.array(req.origin_input_ids, dtype=np.int64)
            window = _window_of(state)
            self._queue.add(Drawn(state.namespace, state.epoch.generation, window, tokens, logits.clone(), req.lora_id))
        else:
            self._skip(AuditSkip.SUSPENDED)

    @property
    def has_work(self) -> bool:
        """Whether audits wait."""
        return len(self._queue) > 0

    @property
    def num_slots(self) -> int:
        return self._queue.num_slots

    def step_if_idle(self, scheduler: Scheduler) -> None:
        """If the scheduler is idle, wait for the running pass, or queue the next one."""
        if not self.has_work or not scheduler.is_fully_idle():
            return
        # NOTE: requests that arrived during a pass are served before another one is queued. Not by asking whether the
        # pass has ended, because ranks would get different answers.
        with self._guarded(in_pass=True):
            if not self._queue.wait():
                self._step(scheduler)

    def step_if_due(self, scheduler: Scheduler) -> None:
        """Count a round; after `_BUSY_INTERVAL` rounds queue the next pass as soon as no request waits for prefill."""
        # NOTE: rounds of prefill count, because a prefill server of PD disaggregation has no others, and is idle only
        # when all rows have been sent.
        if not self.has_work:
            return
        self._num_rounds += 1
        if self._num_rounds < _BUSY_INTERVAL or not _may_queue(scheduler):
            return
        self._num_rounds = 0
        with self._guarded(in_pass=True):
            self._queue.wait()
            self._step(scheduler)

    def _step(self, scheduler: Scheduler) -> None:
        """Apply a verdict, and queue the next pass, if any; the pass before it must be done."""
        self._settle()
        self._series.add(metrics.TOKENS, self._queue.step(scheduler))

    def make_room(self, tree: PicTree) -> bool:
        return self._queue.release_slots() > 0

    def abandon(self) -> None:
        """Drop the waiting audits and wait for the running step, before rows or weights change."""
        self._skip(AuditSkip.FLUSHED, self._queue.abandon())

    def on_weights(self, tree: PicTree) -> None:
        """Clear the windows, and audit nothing while the tree, or a running request, may have rows from before."""
        self._has_old_rows = self._has_rows
        self.abandon()
        self.ledger.renew()
        self._show_windows()

    def on_flush(self) -> None:
        self._has_rows = self._has_old_rows = False
        self.abandon()
        self.ledger.flush()
        self._show_windows()

    def resume(self, number: int) -> bool:
        """Switch a namespace on again; True if `number` is 0 or names a namespace that is off."""
        ended = self.ledger.resume(number)
        for suspension in ended:
            log_resumption(suspension)
        self._show_windows()
        return bool(ended) or number == 0

    def summary(self) -> str:
        num_audited = sum(tally.num_audited for tally in self._tallies.values())
        num_new, self._num_summed = num_audited - self._num_summed, num_audited
        worst = max(map(self.ledger.worst, Window))
        return f"{num_new} audits, worst mean KL {worst:.4f} of at most {self._config.audit_kl_limit:.4g} nats"

    def reports(self) -> dict[str, msgspec.Struct]:
        return {"audit": self.report()}

    def report(self) -> AuditReport:
        """The audit's part of `/server_info`."""
        tallies = self._tallies.values()
        num_audited = sum(tally.num_audited for tally in tallies)
        windows = {
            window: WindowReport(
                num_audited=tally.num_audited,
                num_agreed=tally.num_agreed,
                mean_kl=tally.mean_kl,
                worst_window_kl=self.ledger.worst(window),
            )
            for window, tally in self._tallies.items()
        }
        return AuditReport(
            num_audited=num_audited,
            num_agreed=sum(tally.num_agreed for tally in tallies),
            num_skipped=self._num_skipped,
            num_pending=len(self._queue),
            mean_kl=sum(tally.sum_kl for tally in tallies) / max(1, num_audited),
            worst_window_kl=max(report.worst_window_kl for report in windows.values()),
            windows=windows,
            suspended=self.ledger.suspensions,
        )

    @contextmanager
    def _guarded(self, *, in_pass: bool = False) -> Iterator[None]:
        """Turn an exception into a fault, and drop waiting audits: no answer depends on them."""
        try:
            yield
        except Exception as error:
            self._recovery.recover((), Fallback.FAULT_AUDIT, error, in_pass=in_pass)
            self.abandon()

    def _settle(self) -> None:
        drawn = self._queue.take_measured()
        if drawn is None or drawn.measured is None:
            return
        # NOTE: all ranks must decide alike, or one would splice what another computes.
        kl, differs, is_broken = agree_on_largest(drawn.measured, self._tp_group).tolist()
        if is_broken:
            self._skip(AuditSkip.FULL_NOT_FINITE)
            return
        agreed = not differs
        self._series.add(metrics.AUDITED, value="agree" if agreed else "disagree")
        self._series.observe(metrics.KL, kl, value=drawn.window.value)
        tally = self._tallies[drawn.window]
        tally.num_audited += 1
        tally.num_agreed += agreed
        tally.sum_kl += min(kl, self._config.audit_kl_cap)
        logger.debug("sglang_pic: audited %d tokens: KL %.6f, agreed %s", len(drawn.tokens), kl, agreed)
        suspension = self.ledger.observe(drawn.namespace, drawn.generation, kl, agreed=agreed, window=drawn.window)
        if suspension is not None and (self._tp_group is None or self._tp_group.rank_in_group == 0):
            log_suspension(suspension, self._config, sends_rows=self._sends_rows)
        self._show_windows()

    def _show_windows(self) -> None:
        """Export the windows."""
        decided = [suspension.window for suspension in self.ledger.suspensions]
        for window in Window:
            self._series.set(metrics.SUSPENDED, decided.count(window), value=window.value)
            self._series.set(metrics.WORST_KL, self.ledger.worst(window), value=window.value)

    def _is_present(self, namespace: Namespace, generation: int) -> bool:
        return self.ledger.is_on(namespace) and generation == self.ledger.generation(namespace)

    def _skip(self, reason: AuditSkip, count: int = 1) -> None:
        self._num_skipped += count
        self._series.add(metrics.SKIPPED, count, value=reason.value)


def _window_of(state: RequestState) -> Window:
    if state.inherits:
        return Window.INHERITED
    return Window.CHANGED if state.counts.behind_change else Window.PLAIN


def _may_queue(scheduler: Scheduler) -> bool:
    """Whether a pass may be queued after a round of a busy server: no request waits for prefill."""
    # NOTE: with overlap the next pass has been launched. With a grammar it is sampled after this round, and its logits
    # may be in the buffer that SGLang's captured graphs share, which our pass would overwrite.
    launched = scheduler.result_queue if scheduler.enable_overlap else ()
    awaits_sampling = any(result.delay_sample_func is not None for _, result in launched)
    return not scheduler.waiting_queue and scheduler.chunked_req is None and not awaits_sampling
