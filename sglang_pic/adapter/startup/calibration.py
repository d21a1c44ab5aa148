"""Measures the costs of computing and splicing at start-up, for the cost gate.

Timed on the live model: prefills from 16 tokens up to the largest pass of the server; gap batches with short and with
long contexts, run as for spliced requests; and the host's work around such a pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from sglang.srt.runtime_context import get_schedule

from sglang_pic.adapter.probe.borrowed_slots import borrow_slots, longest_borrowed
from sglang_pic.adapter.probe.extend import PADDING_ROW, different_tokens, trial_batch, trial_forward
from sglang_pic.adapter.probe.ranks import agree_on_largest
from sglang_pic.adapter.probe.window_slots import map_windows
from sglang_pic.adapter.serve.forward import attach_gap_batch
from sglang_pic.adapter.serve.gap_batch import GapBatch, build_gap_batch
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.adapter.sglang.seams import BuildContext, ForwardBatch, ModelRunner, TpGroup
from sglang_pic.adapter.startup.costs import FEW_TOKENS, SEQUENCES, GapTimings, Timing, learn_costs, report
from sglang_pic.adapter.startup.live_model import LiveModel
from sglang_pic.config import PicConfig
from sglang_pic.core import CostModel, Path, Plan, Run
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.views import PoolKind

_RUN = 8
"""Tokens of a run between two gaps."""
_MOST_TOKENS = FEW_TOKENS + _RUN * (SEQUENCES - 1)
"""Tokens of a gap batch and its runs."""
_REPEATS = 5
_NOBODY = Path("calibration", [np.zeros(1, np.int32)])


def calibrate(
    runner: ModelRunner,
    splicer: Splicer,
    *,
    max_sequences: int,
    max_keys: int,
    max_tokens: int,
    tp_group: TpGroup | None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel:
    """Measure the costs on `runner` in a second or two; all ranks of `tp_group` must call it together.

    The pool must have no rows yet, and is left empty.

    Args:
        runner: SGLang's model runner, the forward hooks applied.
        splicer: the forward hooks' splicer.
        max_sequences: most sequences of one batch, 2 or more.
        max_keys: most keys of all sequences of one batch, each as long as the longest.
        max_tokens: most tokens of one prefill pass.
        tp_group: SGLang's tensor-parallel group, or `None` for one rank.
        clock: seconds.

    Returns:
        The cost model of the slowest rank, because every rank must plan alike.
    """
    stopwatch = _Stopwatch(runner, splicer, tp_group, clock)
    row_len = int(runner.req_to_token_pool.req_to_token.shape[1])
    pool_len = int(runner.token_to_kv_pool_allocator.size)
    longest = min(row_len, longest_borrowed(splicer.view, 2))
    with torch.no_grad():
        return learn_costs(
            stopwatch,
            max_tokens=min(max_tokens, row_len),
            max_rows=pool_len // 4,
            max_gaps=max_sequences,
            max_context=min(longest, max_keys // SEQUENCES) - _MOST_TOKENS,
            max_absorbed=longest - _RUN if splicer.view.kind is PoolKind.MLA else 0,
        )


def read_costs(ctx: BuildContext, config: PicConfig, live: LiveModel) -> CostModel | None:
    """The costs for the cost gate: measured, or from the configuration; `None` if the gate is off."""
    if config.cost_gate == "off":
        return None
    if isinstance(config.cost_gate, CostModel):
        cost = config.cost_gate
    else:
        schedule = get_schedule()
        chunk = schedule.chunked_prefill_size or 0
        cost = calibrate(
            live.runner,
            live.splicer,
            max_sequences=live.limits.max_sequences,
            max_keys=live.limits.max_keys,
            max_tokens=chunk if chunk > 0 else schedule.max_prefill_tokens,
            tp_group=ctx.tp_group,
        )
    report(cost, ctx.model_config.context_len)
    return cost


@dataclass(frozen=True, slots=True)
class _Stopwatch:
    """Times the live model; the time of a pass is the slowest rank's."""

    runner: ModelRunner
    splicer: Splicer
    tp_group: TpGroup | None
    clock: Callable[[], float]

    def prefill(self, num_tokens: int, context_len: int = 0) -> Timing:
        """Run as for requests without splices, which read arbitrary rows as their context."""
        if context_len:
            with self._passes(context_len, num_tokens) as (compute, _):
                return self._time(lambda: compute(None))
        input_ids = different_tokens(self.runner, num_tokens, self.splicer.view.device)
        return self._time(
            lambda: trial_forward(self.runner, trial_batch(self.runner, [num_tokens], input_ids=input_ids))
        )

    def splice(self, num_rows: int) -> Timing:
        """Copies free slots; slot 0 is the padding slot."""
        src = torch.arange(1, num_rows + 1, dtype=torch.int64, device=self.splicer.view.device)
        dst, shifts = src + num_rows, torch.full_like(src, 7)
        with map_windows(self.splicer.view, torch.cat((src, dst))):
            return self._time(lambda: self.splicer.splice(src, dst, shifts))

    def gaps(self, num_gaps: int, context_len: int) -> GapTimings:
        """Run as for spliced requests; both passes splice as many rows, and read arbitrary rows as their context."""
        num_runs = num_gaps - 1
        total = FEW_TOKENS + _RUN * num_runs
        end = context_len + total
        one = Plan(prefix_len=context_len, end=end, runs=(_run(context_len, context_len + _RUN * num_runs),))
        gap = FEW_TOKENS // num_gaps
        starts = [context_len + gap + (gap + _RUN) * i for i in range(num_runs)]
        many = Plan(prefix_len=context_len, end=end, runs=tuple(_run(start, start + _RUN) for start in starts))
        with self._passes(context_len, total) as (compute, prepare):
            around = self._time(lambda: prepare(one))
            return GapTimings(self._time(lambda: compute(one)), self._time(lambda: compute(many)), around)

    def gap(self, num_tokens: int, context_len: int = 0) -> Timing:
        """Run as for spliced requests."""
        total = _RUN + num_tokens
        run = _run(context_len, context_len + _RUN)
        plan = Plan(prefix_len=context_len, end=context_len + total, runs=(run,))
        with self._passes(context_len, total) as (compute, _):
            return self._time(lambda: compute(plan))

    @contextmanager
    def _passes(
        self, context_len: int, total: int
    ) -> Iterator[tuple[Callable[[Plan | None], None], Callable[[Plan], None]]]:
        """Two functions of a plan of `total` tokens after a context: one executes it, one does all but the pass.

        Without a plan all of the tokens are computed.
        """
        end = context_len + total
        row = self.runner.req_to_token_pool.req_to_token[PADDING_ROW]
        input_ids = different_tokens(self.runner, total, self.splicer.view.device)
        with borrow_slots(self.splicer.view, 2, end, row) as (donor, target):
            row[:end] = target.to(row.dtype)

            def make_batch() -> ForwardBatch:
                return trial_batch(
                    self.runner,
                    [total],
                    first_position=context_len,
                    input_ids=input_ids,
                    slots=target[context_len:],
                    prefix_len=context_len,
                )

            def lay_out(plan: Plan) -> GapBatch:
                pending = PendingSplice.on_device(plan, [donor[run.target_start : run.target_end] for run in plan.runs])
                return build_gap_batch([pending], [context_len], [total], [total], [row], input_ids.device)

            def compute(plan: Plan | None) -> None:
                batch = make_batch()
                if plan is not None:
                    attach_gap_batch(batch, lay_out(plan))
                trial_forward(self.runner, batch)

            made = make_batch()

            def prepare(plan: Plan) -> None:
                layout = lay_out(plan)
                layout.reads.queue((self.splicer,), layout.locks)
                with layout.narrowed(made, self.runner):
                    pass

            yield compute, prepare

    def _time(self, run: Callable[[], object]) -> Timing:
        return time_run(run, self.splicer.view.device, self.tp_group, self.clock)


def time_run(
    run: Callable[[], object],
    device: torch.device,
    tp_group: TpGroup | None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time some runs after a first one, on the slowest rank; all ranks of `tp_group` must call this together.

    Args:
        run: queues work on a device.
        device: the device, which is waited for.
        tp_group: the ranks.
        clock: in seconds.
    """
    run()
    times, module = [], torch.get_device_module(device)
    for _ in range(_REPEATS):
        module.synchronize(device)
        started_at = clock()
        run()
        module.synchronize(device)
        times.append(1e6 * (clock() - started_at))
    measured = torch.tensor(Timing.of(times), dtype=torch.float64)
    return Timing(*agree_on_largest(measured, tp_group).tolist())


def _run(start: int, end: int) -> Run:
    return Run(target_start=start, target_end=end, donor_start=start, donor=_NOBODY, seam_len=0)
