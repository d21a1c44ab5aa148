"""Runs the start-up self-test: built-in prompts, spliced as requests are, against the same prompts computed in full.

Owns the passes and what is done about the verdict. A splice goes the way that requests take (plan, gap batch, the hook
on the runner's forward pass), with the splicer that will serve; so the test runs when the forward hooks are applied and
before the first request. It must not judge: measures, limits and the verdict are the runtime's.

NOTE: every tensor-parallel rank runs the same passes, since each pass is a collective, and hears the same verdict.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from sglang_pic.adapter.probe.extend import PADDING_ROW, trial_batch, trial_forward
from sglang_pic.adapter.probe.ranks import agree_on_largest, check_alike
from sglang_pic.adapter.probe.slots import borrow_slots, leave_empty, needed_tokens
from sglang_pic.adapter.serve.forward import hand_over
from sglang_pic.adapter.serve.gap_batch import build_gap_batch
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.adapter.startup.prompts import Donor, SelfTestPrompt, built_in_prompts
from sglang_pic.config import PicConfig
from sglang_pic.core import Plan
from sglang_pic.errors import UnsupportedError
from sglang_pic.runtime.self_test import Limits, Measured, SelfTest, Spliced, Verdict, judge, measure
from sglang_pic.runtime.splice import Splicer

__all__ = ["run_self_test", "self_test"]

logger = logging.getLogger(__name__)


def self_test(
    runner: Any, splicer: Splicer, config: PicConfig, *, tokenizer: Any | None, max_gaps: int, tp_group: Any
) -> SelfTest:
    """Test the live model as `config.self_test` says, and log what was found; arguments as of `run_self_test`.

    Raises:
        UnsupportedError: the model does not take splices, and the server is to refuse it; or the ranks' tokenizers
            differ.
    """
    if config.self_test == "off":
        return SelfTest(verdict=Verdict.OFF)
    result = run_self_test(runner, splicer, config, tokenizer=tokenizer, max_gaps=max_gaps, tp_group=tp_group)
    if result.measured is not None:
        logger.info(
            "sglang_pic: self-test %s in %.1f s: %s", result.verdict.value, result.seconds, _table(result.measured)
        )
    if result.verdict is Verdict.SKIPPED:
        logger.warning("sglang_pic: self-test skipped: %s", result.reasons[0])
    elif result.verdict is Verdict.FAILED:
        if config.self_test == "refuse":
            raise UnsupportedError(f"self-test failed: {result.reasons[0]}")
        logger.warning("sglang_pic: self-test failed: %s", result.reasons[0])
    return result


def run_self_test(
    runner: Any, splicer: Splicer, config: PicConfig, *, tokenizer: Any | None, max_gaps: int, tp_group: Any
) -> SelfTest:
    """Splice the built-in prompts on the live model and compare; all ranks of `tp_group` must call it together.

    The pool must hold nobody's rows yet; whatever is written is cleared.

    Args:
        runner: SGLang's model runner, the forward hooks applied.
        splicer: the one that the forward hooks use.
        config: the limits, and the sink and seam that requests get.
        tokenizer: the served model's, or `None` for seeded token ids.
        max_gaps: most gaps of one request.
        tp_group: SGLang's tensor-parallel group, or `None` for one rank.

    Raises:
        UnsupportedError: the ranks' tokenizers differ.
    """
    started_at = time.perf_counter()
    view, row = splicer.view, runner.req_to_token_pool.req_to_token[PADDING_ROW]
    prompts = built_in_prompts(
        tokenizer,
        vocab_size=int(runner.model_config.vocab_size),
        context_len=min(splicer.geometry.max_shift, len(row)),
    )
    # A rank whose tokenizer could not be read would run other passes, and every pass is a collective.
    check_alike({"self-test prompts": msgspec.json.encode(prompts)}, tp_group)
    num_tokens = max(
        (len(tokens) for prompt in prompts for tokens in (prompt.tokens, prompt.reordered.tokens)), default=0
    )
    slots = borrow_slots(view, 3, num_tokens)
    if not prompts:
        return _skipped(f"no built-in prompt fits a context of {splicer.geometry.max_shift} tokens.")
    if not slots:
        return _skipped(
            f"a KV pool of {view.num_slots - view.page_size} tokens is too small: give --max-total-tokens "
            f"{needed_tokens(view, 3, num_tokens)} or more."
        )
    bench = _Bench(runner, splicer, config, max_gaps, row, *slots)
    try:
        with leave_empty(view, slots, row), torch.no_grad():
            measured = torch.stack([bench.try_prompt(prompt) for prompt in prompts])
    except _NothingToSpliceError:
        return _skipped(
            f"core.sink_tokens={config.core.sink_tokens!r} and core.seam_tokens={config.core.seam_tokens!r} leave "
            "nothing of the built-in prompts to splice."
        )
    # Seeded ids are no text: what a model makes of them in another context says nothing of its answers.
    limits = None if tokenizer is None else Limits(config.self_test_kl_limit, config.self_test_key_limit)
    seconds = time.perf_counter() - started_at
    return judge(agree_on_largest(measured, tp_group), limits, dtype=view.dtype, seconds=seconds)


def _skipped(reason: str) -> SelfTest:
    return SelfTest(verdict=Verdict.SKIPPED, reasons=(reason,))


def _table(measured: Measured) -> str:
    rows = (("moved", measured.moved), ("reordered", measured.reordered), ("unrotated", measured.naive))
    return "; ".join(
        f"{name} keys {row.key_error:.2g} ({row.first_key_error:.2g} in the first layer), first token KL "
        f"{row.kl_nats:.2g} nats, same {row.same_top1}/{measured.num_prompts}"
        for name, row in rows
    )


class _NothingToSpliceError(Exception):
    """A prompt's plan has no runs."""


@dataclass(frozen=True, slots=True, eq=False)
class _Bench:
    """The live model with the settings of a request and the slots that may be written."""

    runner: Any
    splicer: Splicer
    config: PicConfig
    max_gaps: int
    row: torch.Tensor
    donor: torch.Tensor
    full: torch.Tensor
    spliced: torch.Tensor

    def try_prompt(self, prompt: SelfTestPrompt) -> torch.Tensor:
        """`[3, 4]`: the measures moved, reordered and naive."""
        logits = self._forward(self._batch(prompt.tokens, self.full))
        self._forward(self._batch(prompt.moved.tokens, self.donor, prompt.moved.position))
        moved = self._compare(prompt, prompt.moved, logits, rotate=True)
        self._forward(self._batch(prompt.reordered.tokens, self.donor, prompt.reordered.position))
        reordered, naive = (self._compare(prompt, prompt.reordered, logits, rotate=rotate) for rotate in (True, False))
        return torch.stack((moved, reordered, naive))

    def _compare(self, prompt: SelfTestPrompt, donor: Donor, logits: torch.Tensor, *, rotate: bool) -> torch.Tensor:
        """The measures of one splice from `donor`, whose rows are there."""
        plan = self._plan(prompt, donor)
        starts = [run.donor_start - donor.position for run in plan.runs]
        rows = [self.donor[start : start + run.num_tokens] for start, run in zip(starts, plan.runs, strict=True)]
        self._poison()
        batch = self._batch(prompt.tokens, self.spliced)
        total = len(prompt.tokens)
        pending = PendingSplice(plan, rows, [], rotate=rotate)
        hand_over(batch, build_gap_batch([pending], [0], [total], [total], [self.row], batch.input_ids.device))
        moved = torch.cat([torch.arange(run.target_start, run.target_end) for run in plan.runs]).to(self.full.device)
        return measure(
            self.splicer, Spliced(logits, self.full[moved]), Spliced(self._forward(batch), self.spliced[moved])
        )

    def _plan(self, prompt: SelfTestPrompt, donor: Donor) -> Plan:
        plan = donor.plan(len(prompt.tokens), self.config.core, max_gaps=self.max_gaps)
        if not plan.runs:
            raise _NothingToSpliceError
        return plan

    def _batch(self, tokens: Sequence[int], slots: torch.Tensor, position: int = 0) -> Any:
        written = slots[: len(tokens)]
        self.row[: len(tokens)] = written.to(self.row.dtype)
        input_ids = torch.tensor(tokens, dtype=torch.int64, device=self.runner.device)
        return trial_batch(self.runner, [len(tokens)], first_position=position, input_ids=input_ids, slots=written)

    def _forward(self, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = trial_forward(self.runner, batch).logits_output.next_token_logits
        assert len(logits) == 1, "one row of logits for one request"
        # Copied, because the runner may write the next pass's logits to the same buffer.
        return logits[0].to(torch.float32, copy=True)

    def _poison(self) -> None:
        """NaN in every dtype, so that a row which neither the splice nor the pass writes shows in all that reads it."""
        for buffer in (*self.splicer.view.keys, *self.splicer.view.values):
            buffer.view(torch.uint8)[self.spliced] = 0xFF
