"""The cost gate, learnt at start-up: what computing and splicing cost on this machine and model.

Three kinds of pass are timed on the live model before the first request: prefills from 16 tokens up to as many as one
pass of the server may have, as requests without splices run; gap batches, on the way that spliced requests take; and
the work of a splice around its pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from sglang_pic.adapter.probe.extend import PADDING_ROW, trial_batch, trial_forward
from sglang_pic.adapter.probe.ranks import agree_on_largest
from sglang_pic.adapter.probe.slots import borrow_slots
from sglang_pic.adapter.seams import ForwardBatch, ModelRunner, TpGroup
from sglang_pic.adapter.serve.forward import hand_over
from sglang_pic.adapter.serve.gap_batch import GapBatch, build_gap_batch
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.core import CostModel, Path, Plan, Run
from sglang_pic.runtime.splice import Splicer

logger = logging.getLogger(__name__)

_FEW = 16
"""Tokens of the shortest passes."""
_GROWTH = 4
_LONG_ENOUGH_US = 100_000.0
"""No longer pass is tried after one like this: a CPU gets there with 64 to 256 tokens, an H100 with thousands."""
_MOST = 8_192
_SEQUENCES = 8
"""Gaps of a pass with many."""
_RUN = 8
"""Tokens of a run between two of them."""
_ROWS = (256, 2_048)
_REPEATS = 5
_NOBODY = Path("calibration", [np.zeros(1, np.int32)])


class Timing(NamedTuple):
    """The shortest of several times, and how far the middle one is above it, in microseconds."""

    us: float
    noise_us: float

    def exceeds(self, other: Timing) -> bool:
        """Whether it is longer by more than noise can make it."""
        return self.us - other.us > 2 * max(self.noise_us, other.noise_us)


def calibrate(
    runner: ModelRunner,
    splicer: Splicer,
    *,
    max_sequences: int,
    max_tokens: int,
    tp_group: TpGroup | None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel:
    """Measure the costs on `runner`; all ranks of `tp_group` must call it together.

    A second or two. The pool must hold nobody's rows yet, and is left empty.

    Args:
        runner: SGLang's model runner, the forward hooks applied.
        splicer: the one that the forward hooks use.
        max_sequences: most sequences of one batch, 2 or more.
        max_tokens: most tokens of one prefill pass.
        tp_group: SGLang's tensor-parallel group, or `None` for one rank.
        clock: seconds.

    Returns:
        The cost model of the slowest rank, because every rank must plan alike.
    """
    bench = _Bench(runner, splicer, tp_group, clock)
    with torch.no_grad():
        passes = _time_passes(bench, max_tokens)
        computed_token_us = _token_cost(passes, what="computed token")
        few, shortest = passes[0]
        rows = [(num_rows, bench.time(bench.splice(num_rows))) for num_rows in bench.row_counts()]
        one, many, request = bench.time_gaps(min(_SEQUENCES, max_sequences))
    floor_us = max(0.0, shortest.us - few * computed_token_us)
    return CostModel(
        computed_token_us=computed_token_us,
        spliced_token_us=_token_cost(rows),
        gap_us=max(0.0, many.us - one.us) / (min(_SEQUENCES, max_sequences) - 1),
        request_us=request.us,
        floor_us=floor_us,
        gap_floor_us=max(floor_us, one.us - request.us - _FEW * computed_token_us),
    )


def report(cost: CostModel, context_len: int) -> None:
    """Log from how many tokens on a run is taken, and warn where none ever is."""
    costs = (
        f"a computed token takes {cost.computed_token_us:.3g} us, a spliced one {cost.spliced_token_us:.3g}, a gap "
        f"{cost.gap_us:.3g}, a splice {cost.request_us:.3g}, the shortest pass {cost.floor_us:.4g} and with gaps "
        f"{cost.gap_floor_us:.4g}"
    )
    if cost.shortest_run(context_len) is None:
        logger.warning(
            "sglang_pic: the cost gate will reject every run, up to the context's %d tokens: %s. Nothing will be "
            'spliced; set cost_gate to "off", or to costs of your own, to splice all the same.',
            context_len,
            costs,
        )
        return
    shortest = {n: cost.shortest_run(n) for n in (512, 2_048, 8_192, 32_768) if n <= context_len}
    taken = ", ".join(f"{'none' if run is None else run} of {n}" for n, run in shortest.items())
    logger.info("sglang_pic: cost gate: %s; shortest run worth splicing alone, in tokens: %s", costs, taken)


@dataclass(frozen=True, slots=True)
class _Bench:
    """What is timed, on the live model."""

    runner: ModelRunner
    splicer: Splicer
    tp_group: TpGroup | None
    clock: Callable[[], float]

    def time(self, run: Callable[[], object]) -> Timing:
        """How long `run` takes on the slowest rank."""
        run()
        device = self.splicer.view.device
        times, module = [], torch.get_device_module(device)
        for _ in range(_REPEATS):
            module.synchronize(device)
            started_at = self.clock()
            run()
            module.synchronize(device)
            times.append(1e6 * (self.clock() - started_at))
        times.sort()
        # Whatever else runs on the machine only adds to a time.
        measured = torch.tensor([times[0], times[len(times) // 2] - times[0]], dtype=torch.float64)
        return Timing(*agree_on_largest(measured, self.tp_group).tolist())

    def prefill(self, num_tokens: int) -> Callable[[], object]:
        """A prefill of `num_tokens`, as requests without splices run it."""
        input_ids = self._input_ids(num_tokens)
        return lambda: trial_forward(self.runner, trial_batch(self.runner, [num_tokens], input_ids=input_ids))

    def row_counts(self) -> list[int]:
        """How many rows are spliced; a pool may be small."""
        return sorted({min(count, int(self.runner.token_to_kv_pool_allocator.size) // 4) for count in _ROWS})

    def splice(self, num_rows: int) -> Callable[[], object]:
        """A splice of `num_rows`, which are nobody's yet; slot 0 is the padding slot."""
        src = torch.arange(1, num_rows + 1, dtype=torch.int64, device=self.splicer.view.device)
        shifts = torch.full_like(src, 7)
        return lambda: self.splicer.splice(src, src + num_rows, shifts)

    def time_gaps(self, num_gaps: int) -> tuple[Timing, Timing, Timing]:
        """A pass with one gap, with `num_gaps`, and what the first of them takes around its pass.

        Both compute `_FEW` tokens and splice as many rows.
        """
        num_runs = num_gaps - 1
        total = _FEW + _RUN * num_runs
        one = Plan(prefix_len=0, end=total, runs=(_run(0, _RUN * num_runs),))
        gap = _FEW // num_gaps
        starts = [gap + (gap + _RUN) * i for i in range(num_runs)]
        many = Plan(prefix_len=0, end=total, runs=tuple(_run(start, start + _RUN) for start in starts))
        row = self.runner.req_to_token_pool.req_to_token[PADDING_ROW]
        input_ids = self._input_ids(total)
        with borrow_slots(self.splicer.view, 2, total, row) as (donor, target):
            row[:total] = target.to(row.dtype)

            def make_batch() -> ForwardBatch:
                return trial_batch(self.runner, [total], input_ids=input_ids, slots=target)

            def lay_out(plan: Plan) -> GapBatch:
                pending = PendingSplice(plan, [donor[run.target_start : run.target_end] for run in plan.runs])
                return build_gap_batch([pending], [0], [total], [total], [row], input_ids.device)

            def compute(plan: Plan) -> None:
                batch = make_batch()
                hand_over(batch, lay_out(plan))
                trial_forward(self.runner, batch)

            made = make_batch()

            def prepare() -> None:
                layout = lay_out(one)
                self.splicer.splice(layout.splice.src, layout.splice.dst, layout.splice.shifts)
                with layout.narrowed(made, self.runner):
                    pass

            return self.time(lambda: compute(one)), self.time(lambda: compute(many)), self.time(prepare)

    def _input_ids(self, num_tokens: int) -> torch.Tensor:
        # Different tokens, because equal ones would all go to the same experts.
        index = torch.arange(num_tokens, dtype=torch.int64, device=self.splicer.view.device)
        return (index * 7_919 + 13) % int(self.runner.model_config.vocab_size)


def _run(start: int, end: int) -> Run:
    return Run(target_start=start, target_end=end, donor_start=start, donor=_NOBODY, seam_len=0)


def _time_passes(bench: _Bench, max_tokens: int) -> list[tuple[int, Timing]]:
    """Prefills of ever more tokens, until a pass is long or has as many as the server computes at once."""
    row_len = int(bench.runner.req_to_token_pool.req_to_token.shape[1])
    most = max(2 * _FEW, min(max_tokens, _MOST, row_len))
    passes = [(_FEW, bench.time(bench.prefill(_FEW)))]
    # NOTE: ranks decide alike, because the time is the slowest rank's.
    while passes[-1][0] < most and (len(passes) < 2 or passes[-1][1].us < _LONG_ENOUGH_US):
        num_tokens = min(passes[-1][0] * _GROWTH, most)
        passes.append((num_tokens, bench.time(bench.prefill(num_tokens))))
    return passes


def _token_cost(timings: Sequence[tuple[int, Timing]], *, what: str = "") -> float:
    """What a token more costs where there are many; warns, if `what` is given, where that is within noise."""
    many, longest = timings[-1]
    mean_us = longest.us / many
    if len(timings) < 2:
        return mean_us
    fewer, long = timings[-2]
    if not longest.exceeds(long):
        if what:
            logger.warning(
                "sglang_pic: the cost of a %s is within noise: %d tokens take %.3g ms, %d take %.3g, give or take "
                "%.2g. The cost gate counts %.3g us, the mean of the longer pass.",
                what,
                fewer,
                long.us / 1e3,
                many,
                longest.us / 1e3,
                2e-3 * max(long.noise_us, longest.noise_us),
                mean_us,
            )
        return mean_us
    if len(timings) > 2 and not long.exceeds(timings[0][1]):
        # The shorter pass waits for launches or weights, so the line through both is too flat.
        return mean_us
    return (longest.us - long.us) / (many - fewer)
