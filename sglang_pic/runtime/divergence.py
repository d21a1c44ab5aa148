"""The distance between two next-token distributions, computed on the device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_and_differs(exact: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """KL(exact || other) in nats, and whether the likeliest token differs.

    Args:
        exact: `[vocab_size]` logits of the reference; a token at -inf adds nothing.
        other: `[vocab_size]` logits.

    Returns:
        Two float64 scalars on the device. The KL is NaN if a logit is NaN, and infinite if a token is at -inf in
        `other` only.
    """
    p, q = (logits.to(torch.float64).log_softmax(-1) for logits in (exact, other))
    kl = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q)).sum()
    return kl, (p.argmax() != q.argmax()).to(torch.float64)
