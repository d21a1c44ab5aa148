"""How far one next-token distribution is from another, on the device that holds them.

Owns the treatment of tokens that a model rules out. Must not wait for the device, and judges nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["kl_and_differs"]


def kl_and_differs(exact: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """KL(exact || other) in nats, and whether the likeliest token differs.

    Args:
        exact: `[vocab_size]` logits of what is compared with; a token at -inf adds nothing, whatever the other says.
        other: `[vocab_size]` logits.

    Returns:
        Two float64 scalars on the device. The first is no number where a logit is none, infinite where `other` rules
        out what `exact` does not.
    """
    p, q = (logits.to(torch.float64).log_softmax(-1) for logits in (exact, other))
    kl = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q)).sum()
    return kl, (p.argmax() != q.argmax()).to(torch.float64)
