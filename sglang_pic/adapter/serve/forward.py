"""The forward pass: executes the splices of a batch, then computes its gaps.

This is the only wrapper of `ModelRunner.forward` and the only hook on `ForwardBatch.init_new`; other code watches
passes as a `Feature`. A batch with neither splices nor observers costs one attribute test.

    ForwardBatch.init_new      take the requests' plans, lay out the gap batch
                               (with DP attention both happened before, in `splice_ahead`)
    ModelRunner.forward        copy the donors' rows, unlock them, narrow the batch to its gaps, compute
    LogitsMetadata             the narrowed batch by request

If any of this raises, the batch is computed whole: its slots are reserved, and a pass writes each row before it reads
it, over spliced and half computed rows. The pass may have more tokens than the prefill budget, which costs time only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final

from sglang_pic.adapter.metrics import Metric, MetricKind, Series
from sglang_pic.adapter.probe.gathered import set_token_counts
from sglang_pic.adapter.serve.draft_passes import DraftPasses, narrowed_fields, widen_batch
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.faults import Recovery
from sglang_pic.adapter.serve.feature import Features
from sglang_pic.adapter.serve.gap_batch import GapBatch, Pass, build_gap_batch
from sglang_pic.adapter.serve.prefill_path import prefill_path, replays_gaps
from sglang_pic.adapter.serve.second_pass import SecondPass
from sglang_pic.adapter.serve.state import PendingSplice, needs_whole_batch
from sglang_pic.adapter.sglang.hooks import hook
from sglang_pic.adapter.sglang.seams import ForwardBatch, ModelRunner, RunnerOutput, ScheduleBatch
from sglang_pic.errors import ContractError
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.views import PoolKind

_ATTRIBUTE = "pic_pass"

SPLICE_SECONDS: Final = Metric(
    "sglang:pic_splice_seconds",
    MetricKind.HISTOGRAM,
    "Time of the scheduler to queue a batch's copies of rows on the device; on a CPU, to copy them.",
    buckets=(1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0),
)
METRICS: Final = (SPLICE_SECONDS,)


class ForwardPath:
    """The forward passes of one scheduler rank.

    Args:
        splicer: copies rows.
        features: watch passes of the target model.
        recovery: after exceptions.
        draft_splicers: copy the rows that the draft model, or each of its heads, has in the same slots.
        series: exports `METRICS`; start-up's checks are not counted.
    """

    def __init__(
        self,
        splicer: Splicer,
        features: Features,
        recovery: Recovery,
        draft_splicers: Sequence[Splicer] = (),
        series: Series | None = None,
    ) -> None:
        self._series = series or Series((), None)
        self.splicer, self._features, self._recovery = splicer, features, recovery
        self.drafts = DraftPasses(draft_splicers)
        # Not an attribute of the batch: SGLang's runner rebuilds the batch for layers and logits.
        self._running: GapBatch | None = None
        self._ahead: tuple[ScheduleBatch, Pass] | None = None
        self.second: SecondPass | None = None
        """Of a server with conditional runs."""

    def install(self) -> None:
        """Register the hooks; SGLang applies them when its registry is applied."""
        hook(__name__, "ForwardBatch.init_new", self._prepare)
        hook(__name__, "ModelRunner.forward", self._forward)
        hook(__name__, "LogitsMetadata.from_forward_batch", self._logits_metadata)
        hook(__name__, "DeepseekV2AttentionMLA.dispatch_attn_forward_method", self._mla_method)

    def _prepare(
        self, forward_batch: ForwardBatch, _cls: type, batch: ScheduleBatch, model_runner: ModelRunner, **_: object
    ) -> None:
        if not batch.forward_mode.is_extend_without_speculative():
            return
        if self.drafts.take(forward_batch, model_runner):
            return
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            planned = self._take_plans(batch, model_runner)
        elif ahead[0] is batch:
            planned = ahead[1]
        else:
            raise ContractError("SGLang computes another batch than the one whose token counts the ranks exchanged.")
        callbacks = [callback for each in self._features if (callback := each.watch(batch)) is not None]
        if planned.gap is not None or callbacks:
            setattr(forward_batch, _ATTRIBUTE, planned._replace(observers=callbacks))

    def splice_ahead(self, batch: ScheduleBatch, model_runner: ModelRunner) -> int | None:
        """Execute the splices of a batch before ranks exchange how many tokens each of them computes.

        If that raises, the batch is computed whole. The current stream must be the one that the pass runs on.

        Returns:
            Tokens of the gaps, which are final; `None` if all of the batch is computed.
        """
        planned = self._take_plans(batch, model_runner)
        gap = planned.gap
        if gap is None:
            return None
        try:
            self._move(gap)
        except Exception as error:
            self._give_up(planned, Fallback.FAULT_SPLICE, error)
            return None
        # A draft's captured graph is not tested with a gap batch's hidden states, and ranks vote once for both.
        replays = not self.drafts.splicers and self._replays(gap, model_runner, batch.multimodal_inputs)
        self._ahead = batch, planned._replace(is_ahead=True, replays=replays)
        return sum(gap.computed_lens)

    def ahead(self, batch: ScheduleBatch) -> Pass | None:
        """The pass that `splice_ahead` prepared for this batch, if it did."""
        return self._ahead[1] if self._ahead is not None and self._ahead[0] is batch else None

    def _replays(self, gap: GapBatch, runner: ModelRunner, media: Sequence[object] | None) -> bool:
        """Whether captured graphs may compute a gap batch of the target model."""
        has_media = any(each is not None for each in media or ())
        is_latent = self.splicer.view.kind is PoolKind.MLA
        # A graph hides the attention of its layers.
        return not has_media and not gap.asking and replays_gaps(runner, len(gap.owners), is_latent=is_latent)

    def _take_plans(self, batch: ScheduleBatch, model_runner: ModelRunner) -> Pass:
        """Take the plans of a batch's requests, and lay out their gap batch if there are any."""
        plans = [req.pic.take_plan() for req in batch.reqs]
        spliced = [req for req, plan in zip(batch.reqs, plans, strict=True) if plan is not None]
        gap = None
        try:
            gap = self.lay_out(plans, batch, model_runner) if spliced else None
        except Exception as error:
            for plan in plans:
                if plan is not None:
                    plan.locks.close()
            self._give_up(Pass(None, spliced=spliced), Fallback.FAULT_GAPS, error)
        return Pass(gap, spliced=spliced)

    def lay_out(
        self, plans: Sequence[PendingSplice | None], batch: ScheduleBatch, model_runner: ModelRunner
    ) -> GapBatch:
        """The gap batch of a batch with at least one plan."""
        assert not any(needs_whole_batch(req) for req in batch.reqs), "admission keeps such requests apart from plans"
        req_to_token = model_runner.req_to_token_pool.req_to_token
        rows = [req_to_token[req.kv.req_pool_idx] for req in batch.reqs]
        return build_gap_batch(
            plans, batch.prefix_lens, batch.extend_lens, batch.extend_logprob_start_lens, rows, req_to_token.device
        )

    def _forward(
        self, original: Callable[..., RunnerOutput], runner: ModelRunner, batch: ForwardBatch, *args: Any, **kwargs: Any
    ) -> RunnerOutput:
        planned: Pass | None = getattr(batch, _ATTRIBUTE, None)
        if planned is not None:
            delattr(batch, _ATTRIBUTE)
        else:
            planned = self.drafts.pass_of(batch, runner)
        if planned is None:
            return original(runner, batch, *args, **kwargs)
        compute = partial(original, runner, batch, *args, **kwargs)
        output = compute() if planned.gap is None else self._compute_gaps(compute, runner, batch, planned, planned.gap)
        for callback in planned.observers:
            callback(output)
        return output

    def _compute_gaps(
        self,
        compute: Callable[[], RunnerOutput],
        runner: ModelRunner,
        batch: ForwardBatch,
        planned: Pass,
        gap: GapBatch,
    ) -> RunnerOutput:
        """Copy the rows and compute the gaps; after a fault restore the whole batch and compute it."""
        whole, reason, in_pass = dict(vars(batch)), Fallback.FAULT_SPLICE, planned.is_ahead
        try:
            is_moved = planned.is_ahead or planned.of_draft
            if not is_moved:
                self._move(gap, is_trial=planned.is_trial)
            reason = Fallback.FAULT_GAPS
            # Ranks replay graphs together or not at all.
            replays = planned.replays if is_moved else self._replays(gap, runner, batch.mm_inputs)
            more = narrowed_fields(gap, batch, runner) if planned.of_draft else None
            with self._narrowed(gap, batch, runner, more, replays=replays):
                in_pass = True
                with nullcontext() if self.second is None else self.second.watching(gap.asking):
                    output = compute()
            if self.second is not None and gap.asking:
                output = self._compute_second(compute, runner, batch, planned, gap, whole, self.second)
            self.drafts.follow(planned, gap, batch, output)
            return output
        except Exception as error:
            gap.locks.close()
            self._give_up(planned, reason, error, in_pass=in_pass)
        _restore(batch, whole)
        if planned.of_draft:
            widen_batch(gap, batch)
        if runner.lora_manager is not None:
            runner.lora_manager.prepare_lora_batch(batch)
        return compute()

    def _compute_second(
        self,
        compute: Callable[[], RunnerOutput],
        runner: ModelRunner,
        batch: ForwardBatch,
        planned: Pass,
        gap: GapBatch,
        whole: Mapping[str, Any],
        second: SecondPass,
    ) -> RunnerOutput:
        """Compute what the prompts' ends attend to, and the ends again."""
        chosen = second.choose(gap.asking)
        _restore(batch, whole)
        with self._narrowed(gap.second(chosen), batch, runner, replays=False):
            output = compute()
        if not planned.is_trial:
            second.count(gap.asking, chosen, planned.spliced)
        return output

    @contextmanager
    def _narrowed(
        self,
        gap: GapBatch,
        batch: ForwardBatch,
        runner: ModelRunner,
        more: Mapping[str, Any] | None = None,
        *,
        replays: bool,
    ) -> Iterator[None]:
        """A pass over a layout, with these further fields of the batch."""
        with prefill_path(runner, replays=replays), gap.narrowed(batch, runner, more):
            self._running = gap
            try:
                yield
            finally:
                self._running = None

    def _give_up(self, planned: Pass, reason: Fallback, error: Exception, *, in_pass: bool = False) -> None:
        if planned.is_trial:
            raise error
        self._recovery.recover(planned.spliced, reason, error, is_admitted=not planned.of_draft, in_pass=in_pass)

    def _move(self, gap: GapBatch, *, is_trial: bool = False) -> None:
        began = time.perf_counter()
        self.move_rows(gap)
        if not is_trial:
            self._series.observe(SPLICE_SECONDS, time.perf_counter() - began)

    def move_rows(self, gap: GapBatch) -> None:
        """Queue the copy of the donors' rows, the target's and the draft's, and unlock the donors.

        NOTE: unlocking is safe once the copy is queued: a freed donor slot is written by a later pass on the same
        stream. Rows on the host are unlocked when they have been read.
        """
        try:
            gap.reads.queue((self.splicer, *self.drafts.splicers), gap.locks)
        finally:
            gap.locks.close()

    def _logits_metadata(self, original: Callable[..., Any], cls: type, forward_batch: ForwardBatch) -> Any:
        gap = self._running
        return original(cls, forward_batch if gap is None else gap.per_request_view(forward_batch))

    def _mla_method(self, original: Callable[..., Any], attention: Any, forward_batch: ForwardBatch) -> Any:
        # Called in any case: it stores in SGLang's layer which backend to call.
        method = original(attention, forward_batch)
        if self._running is None:
            return method
        from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

        # The MHA paths of DeepSeek re-project a sequence's whole prefix; a gap batch has it in the pool already.
        return AttnForwardMethod.MLA


def _restore(batch: ForwardBatch, whole: Mapping[str, Any]) -> None:
    """SGLang has changed the batch as a narrowed one: it gets the fields that it had."""
    vars(batch).clear()
    vars(batch).update(whole)


def attach_gap_batch(forward_batch: ForwardBatch, gap: GapBatch, *, of_draft: bool = False) -> None:
    """Have the next forward pass over `forward_batch`, a `trial_batch`, execute `gap`, which all ranks have alike.

    A draft model's rows must be copied already.
    """
    set_token_counts(forward_batch, sum(gap.computed_lens))
    setattr(forward_batch, _ATTRIBUTE, Pass(gap, of_draft=of_draft, is_trial=True))
