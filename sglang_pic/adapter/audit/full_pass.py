"""The full computation of one audited prompt, a step of few tokens at a time.

The rows belong to no namespace: the tree never sees them, they are read through the padding row of the request pool,
and their slots go back when the last logits are there.

    slots of one prompt
    [0, done)      computed by earlier steps
    [done, end)    this step, at most `STEP_TOKENS`
    [end, L)       taken, still empty; L is rounded up to whole pages
"""

from __future__ import annotations

import numpy as np
import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache

from sglang_pic.adapter.probe.extend import PADDING_ROW, trial_batch, trial_forward
from sglang_pic.adapter.probe.slots import whole_pages
from sglang_pic.adapter.seams import Allocator, ModelRunner, Tree

STEP_TOKENS = 256
"""Most tokens that an arriving request waits for: about the smallest batch that keeps a GPU busy."""

# A prompt takes at most one fourth of the pool, because room is made by evicting rows that requests may reuse.
_LARGEST_PART = 4


class FullPass:
    """One prompt on its way through the model.

    Args:
        runner: SGLang's model runner.
        tokens: `[prompt_len]` int64, on the CPU.
        slots: as `take_slots` gave them; the caller gives them back.
        lora_id: the prompt's LoRA adapter, which must be on the device at every step.
    """

    def __init__(
        self, runner: ModelRunner, tokens: np.ndarray, slots: torch.Tensor, *, lora_id: str | None = None
    ) -> None:
        self._runner = runner
        self._lora_id = lora_id
        self._tokens = tokens
        self._done = 0
        self.slots = slots
        self.logits = torch.empty(0)  # of the last token that was computed

    def step(self) -> int:
        """Compute the next tokens on the current stream, SGLang's forward stream, and return their number."""
        start, end = self._done, min(self._done + STEP_TOKENS, len(self._tokens))
        self.logits = compute_rows(self._runner, self._tokens, self.slots, start, end, lora_id=self._lora_id)
        self._done = end
        return end - start

    @property
    def is_complete(self) -> bool:
        """Whether `logits`, `[vocab_size]`, are those of the last prompt token."""
        return self._done == len(self._tokens)


def compute_rows(
    runner: ModelRunner, tokens: np.ndarray, slots: torch.Tensor, start: int, end: int, *, lora_id: str | None
) -> torch.Tensor:
    """Compute tokens `[start, end)` of a prompt on the current stream, behind the rows that are in its first slots.

    Args:
        runner: SGLang's model runner.
        tokens: `[prompt_len]` int64, on the CPU.
        slots: `[end]` or longer, the slot of each token.
        start: the first token.
        end: behind the last one.
        lora_id: an adapter that is on the device.

    Returns:
        `[vocab_size]`, the logits of the last one.
    """
    row = runner.req_to_token_pool.req_to_token[PADDING_ROW]
    row[:end] = slots[:end].to(row.dtype)
    try:
        batch = trial_batch(
            runner,
            [end - start],
            first_position=start,
            input_ids=torch.from_numpy(tokens[start:end]).to(runner.device),
            slots=slots[start:end].to(torch.int64),
            prefix_len=start,
            lora_id=lora_id,
        )
        return trial_forward(runner, batch).logits_output.next_token_logits[0]
    finally:
        # Padded entries of a batch read this row too.
        row[:end] = 0


def is_too_long(allocator: Allocator, num_tokens: int) -> bool:
    """Whether a prompt takes too much of the pool to be computed for an audit."""
    return _LARGEST_PART * whole_pages(num_tokens, allocator.page_size) > allocator.size


def take_slots(tree: Tree, num_tokens: int, *, kept: int = 0) -> torch.Tensor | None:
    """Slots for a prompt, or `None` if evicting unused rows does not free enough; `kept` of these must stay."""
    allocator = tree.token_to_kv_pool_allocator
    needed = whole_pages(num_tokens, allocator.page_size)
    if needed > allocator.available_size() + tree.evictable_size() - kept:
        return None
    evict_from_tree_cache(tree, needed)
    return allocator.alloc(needed)
