"""Computes a prompt in steps of few tokens.

Rows are read through the padding row of the request pool. Their slots are borrowed from the pool: they are in no
namespace and never in the tree, and are returned when the last logits are computed.

    slots of one prompt
    [0, done)      computed by earlier steps
    [done, end)    this step, at most `STEP_TOKENS`
    [end, L)       taken, still empty; L is rounded up to whole pages
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.runtime_context import get_lora

from sglang_pic.adapter.probe.borrowed_slots import whole_pages
from sglang_pic.adapter.probe.copies import to_device
from sglang_pic.adapter.probe.extend import PADDING_ROW, trial_batch, trial_logits
from sglang_pic.adapter.probe.window_slots import alloc_anew, least_room
from sglang_pic.adapter.sglang.seams import Allocator, ModelRunner, Tree

STEP_TOKENS = 256
"""Tokens of a step, for which an arriving request may wait: about the smallest batch that keeps a GPU busy."""

# A prompt takes at most a fourth of the pool, because slots are freed by evicting rows that requests may reuse.
_LARGEST_PART = 4


class PromptPass:
    """The computation of one prompt.

    Args:
        runner: SGLang's model runner.
        tokens: `[prompt_len]` int64, on the CPU.
        slots: `[prompt_len]` or longer, from `take_slots`; the caller frees them.
        lora_id: the prompt's LoRA adapter, which must be on the device at every step.
    """

    def __init__(
        self, runner: ModelRunner, tokens: np.ndarray, slots: torch.Tensor, *, lora_id: str | None = None
    ) -> None:
        self._runner, self._tokens, self._num_done, self._lora_id = runner, tokens, 0, lora_id
        self.slots = slots
        self.logits = torch.empty(0)  # of the last token that was computed

    def step(self) -> int:
        """Queue the next tokens on the current stream, SGLang's forward stream; returns their number."""
        start, end = self._num_done, min(self._num_done + STEP_TOKENS, len(self._tokens))
        row = self._runner.req_to_token_pool.req_to_token[PADDING_ROW]
        row[:end] = self.slots[:end].to(row.dtype)
        try:
            batch = trial_batch(
                self._runner,
                [end - start],
                first_position=start,
                input_ids=to_device(self._tokens[start:end], self._runner.device),
                slots=self.slots[start:end].to(torch.int64),
                prefix_len=start,
                lora_id=self._lora_id,
            )
            (self.logits,) = trial_logits(self._runner, batch)
        finally:
            # Padded entries of a batch read this row too.
            row[:end] = 0
        self._num_done = end
        return end - start

    @property
    def is_complete(self) -> bool:
        """Whether `logits`, `[vocab_size]`, are those of the last prompt token."""
        return self._num_done == len(self._tokens)


def is_too_long(allocator: Allocator, num_tokens: int) -> bool:
    """Whether a prompt needs more than a fourth of the pool."""
    return _LARGEST_PART * whole_pages(num_tokens, allocator.page_size) > allocator.size


def take_slots(tree: Tree, num_tokens: int) -> torch.Tensor | None:
    """Slots for a prompt, or `None` if evicting unused rows does not free enough."""
    allocator = tree.token_to_kv_pool_allocator
    needed = whole_pages(num_tokens, allocator.page_size)
    if needed > least_room(tree):
        return None
    evict_from_tree_cache(tree, needed)
    return alloc_anew(tree, needed)


def has_adapter(manager: Any, lora_id: str) -> bool:
    """Whether an adapter is on the device; an adapter that SGLang evicted is not loaded again."""
    # NOTE: an adapter that loads beside forward passes arrives in a different round on each rank.
    return not get_lora().enable_lora_overlap_loading and lora_id in manager.memory_pool.uid_to_buffer_id
