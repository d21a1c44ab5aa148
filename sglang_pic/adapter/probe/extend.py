"""Forward passes of the live model runner that belong to no request, for what is measured and checked.

Owns the making of SGLang's `ForwardBatch` by hand: sequences on the row of the request pool and, unless told otherwise,
the slot of the KV pool that SGLang keeps for padding, so that nothing has to be allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["PADDING_ROW", "trial_batch", "trial_extend", "trial_forward"]

PADDING_ROW = 0
"""The row of the request pool that belongs to no request."""


def trial_extend(
    runner: Any,
    lens: Sequence[int],
    *,
    first_position: int = 0,
    input_ids: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    prefix_len: int = 0,
) -> Any:
    """One forward pass over the batch that `trial_batch` makes of the same arguments; what the runner returns."""
    batch = trial_batch(
        runner, lens, first_position=first_position, input_ids=input_ids, slots=slots, prefix_len=prefix_len
    )
    return trial_forward(runner, batch)


def trial_forward(runner: Any, batch: Any) -> Any:
    """The forward pass of a `batch` of `trial_batch`; what the runner returns."""
    from sglang.srt.environ import envs

    # NOTE: the scheduler waits for the event that its own last pass left here, and for the whole stream where that pass
    # left none. An event of ours would let it write tables that a pass of its own still reads.
    event = runner.shared_read_done_event
    try:
        # The runner's static input buffers are sized for the requests that may run, not for these sequences.
        with envs.SGLANG_EAGER_INPUT_NO_COPY.override(True):
            return runner.forward(batch)
    finally:
        runner.shared_read_done_event = event


def trial_batch(
    runner: Any,
    lens: Sequence[int],
    *,
    first_position: int = 0,
    input_ids: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    prefix_len: int = 0,
) -> Any:
    """A batch of sequences of `lens` new tokens, each behind `prefix_len` tokens that are there already.

    Args:
        runner: SGLang's model runner.
        lens: tokens of each sequence.
        first_position: the position of every sequence's first new token; who attends to whom does not depend on it.
        input_ids: `[sum(lens)]` int64; token 0 everywhere by default.
        slots: `[sum(lens)]` int64, where the rows are written; the padding slot by default. Attention reads the slots
            that `PADDING_ROW` names: whoever passes these has written them there.
        prefix_len: tokens whose rows are in the slots that `PADDING_ROW` begins with.

    Returns:
        SGLang's `ForwardBatch`, for one `trial_forward`, before another batch is made.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    device, total = runner.device, sum(lens)
    int32 = {"dtype": torch.int32, "device": device}
    int64 = {"dtype": torch.int64, "device": device}
    starts = [sum(lens[:i]) for i in range(len(lens))]
    seq_lens = [prefix_len + n for n in lens]
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lens),
        input_ids=torch.zeros(total, **int64) if input_ids is None else input_ids,
        req_pool_indices=torch.full((len(lens),), PADDING_ROW, **int64),
        seq_lens=torch.tensor(seq_lens, **int64),
        seq_lens_cpu=torch.tensor(seq_lens, dtype=torch.int64),
        seq_lens_sum=sum(seq_lens),
        orig_seq_lens=torch.tensor(seq_lens, **int32),
        req_pool_indices_cpu=torch.full((len(lens),), PADDING_ROW, dtype=torch.int64),
        out_cache_loc=torch.zeros(total, **int64) if slots is None else slots,
        positions=torch.cat([torch.arange(first_position, first_position + n, **int64) for n in lens]),
        extend_num_tokens=total,
        extend_seq_lens=torch.tensor(lens, **int32),
        extend_seq_lens_cpu=list(lens),
        extend_prefix_lens=torch.full((len(lens),), prefix_len, **int32),
        extend_prefix_lens_cpu=[prefix_len] * len(lens),
        extend_start_loc=torch.tensor(starts, **int32),
        extend_logprob_start_lens_cpu=list(lens),
        spec_algorithm=runner.spec_algorithm,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    _prepare_no_adapters(runner, batch)
    if runner.model_config.model_is_mrope:
        batch.mrope_positions = batch.positions.unsqueeze(0).expand(3, -1)
    translator = runner.kv_index_translator
    translator.own_plan(batch).bind(batch, translator)
    batch._init_num_token_non_padded(device=device, is_draft_worker=False)
    return batch


def _prepare_no_adapters(runner: Any, batch: Any) -> None:
    # Adapters are applied by what was prepared last: this batch has none, the one before may have.
    if runner.lora_manager is not None:
        batch.lora_ids = [None] * batch.batch_size
        runner.lora_manager.prepare_lora_batch(batch)
