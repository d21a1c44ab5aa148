"""Runs the start-up self-test: compares spliced built-in prompts with the same prompts computed in full.

A splice runs as for a request (plan, gap batch, the hook on the runner's forward pass), so the test runs after the
forward hooks are applied, and before the first request.

NOTE: every tensor-parallel rank runs the same passes, because each pass is a collective, and gets the same verdict.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import torch

from sglang_pic.adapter.metrics import Metric, MetricKind, Series
from sglang_pic.adapter.probe.borrowed_slots import PoolTooSmallError, borrow_slots
from sglang_pic.adapter.probe.extend import PADDING_ROW, on_forward_stream, trial_batch, trial_logits
from sglang_pic.adapter.probe.ranks import agree_on_largest, check_alike
from sglang_pic.adapter.serve.forward import attach_gap_batch
from sglang_pic.adapter.serve.gap_batch import build_gap_batch
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.adapter.sglang.seams import BuildContext, ForwardBatch, ModelRunner, TpGroup
from sglang_pic.adapter.startup.live_model import LiveModel
from sglang_pic.adapter.startup.prompts import Donor, SelfTestPrompt, built_in_prompts
from sglang_pic.adapter.startup.tokenizer import Tokenizer
from sglang_pic.config import PicConfig
from sglang_pic.errors import UnsupportedError
from sglang_pic.runtime.checks.spliced_prompts import (
    OperatorLimits,
    Outcome,
    PromptPass,
    SelfTest,
    judge_prompts,
    measure_prompt,
)
from sglang_pic.runtime.splice import Splicer

logger = logging.getLogger(__name__)

PASSED: Final = Metric(
    "sglang:pic_self_test_passed", MetricKind.GAUGE, "1 if the start-up self-test was within all limits, else 0."
)
METRICS: Final = (PASSED,)


def check_answers(
    ctx: BuildContext, config: PicConfig, live: LiveModel, max_gaps: int, labels: Mapping[str, str] | None
) -> SelfTest:
    """Run the self-test on SGLang's forward stream; export its verdict, and log or refuse as `log_result` does."""
    runner, splicer, tokenizer = live.runner, live.splicer, live.tokenizer
    with on_forward_stream(runner):
        tested = run_self_test(runner, splicer, config, tokenizer=tokenizer, max_gaps=max_gaps, tp_group=ctx.tp_group)
    if tested.measured is not None:
        Series(METRICS, labels).set(PASSED, tested.passed)
    log_result(tested, config)
    return tested


def log_result(result: SelfTest, config: PicConfig) -> None:
    """Log the result of the self-test.

    Raises:
        UnsupportedError: splices are not exact, or a limit is exceeded and `config.self_test` is `refuse`.
    """
    if result.measured is not None:
        rows = {"moved": result.measured.moved, "reordered": result.measured.reordered, "naive": result.measured.naive}
        table = "; ".join(
            f"{name} keys {row.key_error:.2g} ({row.first_key_error:.2g} in the first layer), first token KL "
            f"{row.kl_nats:.2g} nats, same {row.same_top1}/{result.measured.num_prompts}"
            for name, row in rows.items()
        )
        logger.info("sglang_pic: self-test %s in %.1f s: %s", result.verdict.value, result.seconds, table)
    if result.reasons:
        line = f"self-test {result.verdict.value}: {result.reasons[0]}"
        if not result.is_exact or (result.verdict is Outcome.FAILED and config.self_test == "refuse"):
            raise UnsupportedError(line)
        logger.warning("sglang_pic: %s", line)


def run_self_test(
    runner: ModelRunner,
    splicer: Splicer,
    config: PicConfig,
    *,
    tokenizer: Tokenizer | None,
    max_gaps: int,
    tp_group: TpGroup | None,
) -> SelfTest:
    """Splice the built-in prompts on the live model and compare; all ranks of `tp_group` must call this together.

    The pool must have no rows yet, and is left empty.

    Args:
        runner: SGLang's model runner, the forward hooks applied.
        splicer: the forward hooks' splicer.
        config: whether to test, the limits, and the sink and seam of requests.
        tokenizer: the served model's, or `None` for seeded token ids.
        max_gaps: most gaps of one request.
        tp_group: SGLang's tensor-parallel group, or `None` for one rank.

    Raises:
        UnsupportedError: the tokenizers of the ranks differ.
    """
    if config.self_test == "off":
        return SelfTest(verdict=Outcome.OFF)
    started_at = time.perf_counter()
    context_len = min(splicer.geometry.max_shift, runner.req_to_token_pool.req_to_token.shape[1])
    prompts = built_in_prompts(tokenizer, vocab_size=int(runner.model_config.vocab_size), context_len=context_len)
    # A rank whose tokenizer could not be read would run other passes, and every pass is a collective.
    check_alike({"self-test prompts": msgspec.json.encode(prompts)}, tp_group)
    try:
        measured = _measure(prompts, runner, splicer, config, max_gaps)
    except (_SkippedError, PoolTooSmallError) as error:
        return SelfTest(verdict=Outcome.SKIPPED, reasons=(str(error),))
    # Seeded ids are not text: their errors say nothing about answers.
    limits = None if tokenizer is None else OperatorLimits(config.self_test_kl_limit, config.self_test_key_limit)
    seconds = time.perf_counter() - started_at
    return judge_prompts(agree_on_largest(measured, tp_group), limits, dtype=splicer.view.dtype, seconds=seconds)


class _SkippedError(Exception):
    """The self-test cannot run here; the message says why."""


def _measure(
    prompts: list[SelfTestPrompt], runner: ModelRunner, splicer: Splicer, config: PicConfig, max_gaps: int
) -> torch.Tensor:
    """`[num_prompts, 4, 4]`."""
    if not prompts:
        raise _SkippedError(f"no built-in prompt fits a context of {splicer.geometry.max_shift} tokens.")
    donors = [(len(prompt.tokens), donor) for prompt in prompts for donor in (prompt.moved, prompt.reordered)]
    if not all(donor.plan(total, config.core, max_gaps=max_gaps).runs for total, donor in donors):
        raise _SkippedError(
            f"core.sink_tokens={config.core.sink_tokens!r} and core.seam_tokens={config.core.seam_tokens!r} leave "
            "nothing of the built-in prompts to splice."
        )
    num_tokens = max(len(tokens) for prompt in prompts for tokens in (prompt.tokens, prompt.reordered.tokens))
    row = runner.req_to_token_pool.req_to_token[PADDING_ROW]
    with borrow_slots(splicer.view, 3, num_tokens, row) as slots, torch.no_grad():
        bench = _Bench(runner, splicer, config, max_gaps, row, *slots)
        return torch.stack([bench.try_prompt(prompt) for prompt in prompts])


@dataclass(frozen=True, slots=True, eq=False)
class _Bench:
    """The live model with the settings of a request and the slots to write."""

    runner: ModelRunner
    splicer: Splicer
    config: PicConfig
    max_gaps: int
    row: torch.Tensor
    donor: torch.Tensor
    full: torch.Tensor
    spliced: torch.Tensor

    def try_prompt(self, prompt: SelfTestPrompt) -> torch.Tensor:
        """`[4, 4]`: the measures of the moved, reordered and unrotated splice, and of a full prefill elsewhere."""
        logits = self._forward(self._batch(prompt.tokens, self.full))
        logits_elsewhere = self._forward(self._batch(prompt.moved.tokens, self.donor, prompt.moved.position))
        elsewhere = measure_prompt(
            self.splicer, PromptPass(logits, self.full[:1]), PromptPass(logits_elsewhere, self.full[:1])
        )
        moved = self._compare(prompt, prompt.moved, logits, rotate=True)
        self._forward(self._batch(prompt.reordered.tokens, self.donor, prompt.reordered.position))
        reordered, naive = (self._compare(prompt, prompt.reordered, logits, rotate=rotate) for rotate in (True, False))
        return torch.stack((moved, reordered, naive, elsewhere))

    def _compare(self, prompt: SelfTestPrompt, donor: Donor, logits: torch.Tensor, *, rotate: bool) -> torch.Tensor:
        """The measures of one splice from `donor`, whose rows are computed."""
        plan = donor.plan(len(prompt.tokens), self.config.core, max_gaps=self.max_gaps)
        starts = [run.donor_start - donor.position for run in plan.runs]
        rows = [self.donor[start : start + run.num_tokens] for start, run in zip(starts, plan.runs, strict=True)]
        total = len(prompt.tokens)
        # NaN in every dtype: a row that neither the splice nor the pass writes shows in all later rows. Not beyond the
        # prompt: kernels that read whole pages multiply the rest by 0.
        self.splicer.view.fill(self.spliced[:total], 0xFF)
        # The pass gets other tokens for the runs, so that computing these would be wrong.
        given = torch.tensor(prompt.tokens)
        for run in plan.runs:
            given[run.target_start : run.target_end] += 1
        batch = self._batch((given % self.runner.model_config.vocab_size).tolist(), self.spliced)
        gap = build_gap_batch(
            [PendingSplice.on_device(plan, rows)], [0], [total], [total], [self.row], batch.input_ids.device
        )
        if not rotate:
            gap.reads.splice.shifts.zero_()
        attach_gap_batch(batch, gap)
        moved = torch.cat([torch.arange(run.target_start, run.target_end) for run in plan.runs]).to(self.full.device)
        full, spliced = PromptPass(logits, self.full[moved]), PromptPass(self._forward(batch), self.spliced[moved])
        return measure_prompt(self.splicer, full, spliced)

    def _batch(self, tokens: Sequence[int], slots: torch.Tensor, position: int = 0) -> ForwardBatch:
        written = slots[: len(tokens)]
        self.row[: len(tokens)] = written.to(self.row.dtype)
        input_ids = torch.tensor(tokens, dtype=torch.int64, device=self.runner.device)
        return trial_batch(self.runner, [len(tokens)], first_position=position, input_ids=input_ids, slots=written)

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        return trial_logits(self.runner, batch)[0]
