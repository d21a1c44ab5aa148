"""What the last tokens of a prompt attend to: scores of spans by their best attended token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_pic.core import Span

_MOST_LOGITS = 1 << 24
"""Logits in memory at a time."""


def best_attended(queries: Tensor, keys: Tensor, spans: Sequence[Span], *, scaling: float) -> Tensor:
    """The attention of each span's best token, a mean over the queries and their heads; `[num_spans]` float32.

    Args:
        queries: `[n, num_heads, head_dim]`, rotated, of the last `n` tokens of the sequence.
        keys: `[num_tokens, num_kv_heads, head_dim]` of the whole sequence, rotated.
        spans: of the sequence, not empty.
        scaling: of the logits.
    """
    n, num_tokens, num_kv_heads = len(queries), len(keys), keys.shape[1]
    grouped = queries.unflatten(1, (num_kv_heads, -1)).float()
    places = torch.arange(num_tokens, device=keys.device)
    is_later = places > places[num_tokens - n :, None]
    total = torch.zeros(num_tokens, device=keys.device)
    # For 128k tokens the logits of one head are 32 MiB, and a KV head may have dozens.
    num_at_once = max(1, _MOST_LOGITS // (n * num_tokens))
    for head in range(num_kv_heads):
        head_keys = keys[:, head].float()
        for some in grouped[:, head].split(num_at_once, dim=1):
            logits = torch.einsum("ngd,td->gnt", some, head_keys).mul_(scaling)
            total += logits.masked_fill_(is_later, float("-inf")).softmax(-1).sum((0, 1))
    mean = total / (n * queries.shape[1])
    return torch.stack([mean[start:end].max() for start, end in spans])
