"""Forward passes of the live model runner that belong to no request, for start-up checks and audits.

Their batches are made by hand. Sequences use SGLang's padding row of the request pool and, unless the caller gives
slots, its padding slot of the KV pool, so nothing is allocated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sglang_pic.adapter.probe.copies import to_device
from sglang_pic.adapter.probe.gathered import set_token_counts
from sglang_pic.adapter.sglang.seams import ForwardBatch, ModelRunner, RunnerOutput
from sglang_pic.errors import ContractError

PADDING_ROW = 0
"""The row of the request pool that belongs to no request."""


@contextmanager
def on_forward_stream(runner: ModelRunner) -> Iterator[None]:
    """Run start-up's passes on the stream of SGLang's own, after what is queued and before what follows.

    Torch's allocator keeps freed memory for the stream that used it, and SGLang has sized its pools by then. At the end
    all of it is given back: without overlap SGLang's passes run on another stream.
    """
    module, stream = torch.get_device_module(runner.device), runner.forward_stream
    before = module.current_stream()
    stream.wait_stream(before)
    with module.stream(stream):
        yield
    before.wait_stream(stream)
    if hasattr(module, "empty_cache"):  # A CPU has none.
        module.empty_cache()


def different_tokens(runner: ModelRunner, num_tokens: int, device: torch.device, *, first: int = 13) -> torch.Tensor:
    """`[num_tokens]` int64, all different: equal tokens have equal values and experts whatever attention reads."""
    index = torch.arange(num_tokens, dtype=torch.int64, device=device)
    return (index * 7_919 + first) % int(runner.model_config.vocab_size)


def trial_forward(runner: ModelRunner, batch: ForwardBatch) -> RunnerOutput:
    """Run the forward pass of a batch of `trial_batch`."""
    from sglang.srt.environ import envs

    # NOTE: the scheduler waits for the event of its own last pass here, or for the whole stream without an event. An
    # event of this pass would let the scheduler write tables that its own pass still reads.
    event = runner.shared_read_done_event
    try:
        # The runner's static input buffers are sized for running requests, not for these sequences.
        with envs.SGLANG_EAGER_INPUT_NO_COPY.override(True):
            return runner.forward(batch)
    finally:
        runner.shared_read_done_event = event


def trial_logits(runner: ModelRunner, batch: ForwardBatch) -> torch.Tensor:
    """The last token's logits of each sequence of a `trial_batch`, `[num_sequences, vocab_size]` float32.

    Raises:
        ContractError: SGLang returned logits for another number of sequences.
    """
    logits: torch.Tensor = trial_forward(runner, batch).logits_output.next_token_logits
    if len(logits) != batch.batch_size:
        raise ContractError(
            f"a batch of {batch.batch_size} requests gave {len(logits)} rows of logits: SGLang must give one row per "
            "request; start without --radix-cache-backend pic."
        )
    # NOTE: copied, because SGLang's captured graphs share one buffer, and the next pass overwrites the logits in it.
    return logits.to(torch.float32, copy=True)


def trial_batch(
    runner: ModelRunner,
    lens: Sequence[int],
    *,
    first_position: int = 0,
    input_ids: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    prefix_len: int = 0,
    lora_id: str | None = None,
) -> ForwardBatch:
    """A batch of sequences of `lens` new tokens, each after `prefix_len` computed tokens; does not block the host.

    Args:
        runner: SGLang's model runner.
        lens: tokens of each sequence.
        first_position: the position of every sequence's first new token; attention does not depend on it.
        input_ids: `[sum(lens)]` int64; zeros by default.
        slots: `[sum(lens)]` int64, the slots to write; the padding slot by default. Attention reads the slots in
            `PADDING_ROW`, so the caller must have written them there.
        prefix_len: tokens whose rows are in the first slots of `PADDING_ROW`.
        lora_id: an adapter that is on the device; none by default.

    Returns:
        The batch, for one `trial_forward` before another batch is made.
    """
    from sglang.srt.model_executor import forward_batch_info as info

    total, rows, prefix_lens = sum(lens), [PADDING_ROW] * len(lens), [prefix_len] * len(lens)
    seq_lens, starts = [prefix_len + n for n in lens], [0, *itertools.accumulate(lens[:-1])]
    there = to_device([*rows, *seq_lens, *lens, *prefix_lens, *starts], runner.device)
    wide, narrow = there.split(len(lens)), there.to(torch.int32).split(len(lens))
    zeros = torch.zeros(total, dtype=torch.int64, device=runner.device)
    batch: Any = info.ForwardBatch(
        forward_mode=info.ForwardMode.EXTEND,
        batch_size=len(lens),
        input_ids=zeros if input_ids is None else input_ids,
        req_pool_indices=wide[0],
        seq_lens=wide[1],
        seq_lens_cpu=torch.tensor(seq_lens, dtype=torch.int64),
        seq_lens_sum=sum(seq_lens),
        orig_seq_lens=narrow[1],
        req_pool_indices_cpu=torch.tensor(rows, dtype=torch.int64),
        out_cache_loc=zeros if slots is None else slots,
        positions=torch.cat([first_position + torch.arange(n, device=runner.device) for n in lens]),
        extend_num_tokens=total,
        extend_seq_lens=narrow[2],
        extend_seq_lens_cpu=list(lens),
        extend_prefix_lens=narrow[3],
        extend_prefix_lens_cpu=prefix_lens,
        extend_start_loc=narrow[4],
        extend_logprob_start_lens_cpu=list(lens),
        spec_algorithm=runner.spec_algorithm,
        capture_hidden_mode=info.CaptureHiddenMode.NULL,
    )
    _prepare(runner, batch, lora_id)
    return batch


def _prepare(runner: ModelRunner, batch: Any, lora_id: str | None) -> None:
    """SGLang's preparations of a batch before its pass."""
    from sglang.srt.model_executor import forward_batch_info as info

    # SGLang applies the adapters that were prepared last.
    if runner.lora_manager is not None:
        batch.lora_ids = [lora_id] * batch.batch_size
        runner.lora_manager.prepare_lora_batch(batch)
    if runner.model_config.model_is_mrope:
        batch.mrope_positions = batch.positions.unsqueeze(0).expand(3, -1)
    translator = runner.kv_index_translator
    translator.own_plan(batch).bind(batch, translator)
    num_tokens = len(batch.input_ids)
    if info.enable_num_token_non_padded():
        batch.global_num_token_non_padded = torch.full((), num_tokens, dtype=torch.int32, device=runner.device)
    batch.global_num_token_non_padded_cpu = num_tokens
    set_token_counts(batch, num_tokens)
