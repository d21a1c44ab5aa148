"""Owns routed experts: softmax routing, and one product per layer over tokens sorted by their expert.

The grouped product is torch's own where it runs and is right on this device and dtype; elsewhere a loop over the
experts, which waits for the device once a layer. Which of them it is, is part of a result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Experts"]

_Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`product(tokens [n, a], weights [experts, b, a], ends [experts] int32)`: `[n, b]`."""


class Experts:
    """The experts of one layer, without shared ones; `down` and `gate_up` are as `linear` takes them."""

    def __init__(self, *, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> None:
        """Try the grouped product once on these weights."""
        self._router, self._gate_up, self._down, self._top_k = router, gate_up, down, top_k
        self.way, self._product = _choose(gate_up)

    def __call__(self, hidden: Tensor) -> Tensor:
        """`hidden` `[num_tokens, hidden]` through each token's `top_k` experts, weighted by the router."""
        weights, chosen = F.linear(hidden, self._router).float().softmax(dim=-1).topk(self._top_k, dim=-1)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(len(self._router), dtype=torch.int32, device=hidden.device)
        ends = counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0).to(torch.int32)
        tokens = order // self._top_k
        gate, up = self._product(hidden[tokens], self._gate_up, ends).chunk(2, dim=-1)
        result = self._product(F.silu(gate) * up, self._down, ends)
        result = result * weights.flatten()[order, None].to(result.dtype)
        return torch.zeros_like(hidden).index_add_(0, tokens, result)


def _choose(weights: Tensor) -> tuple[str, _Product]:
    """The grouped product if it agrees with the loop."""
    name, grouped = _grouped()
    if grouped is None:
        return "loop: this torch has no grouped product", _loop
    tokens = torch.randn((8, weights.shape[2]), dtype=weights.dtype, device=weights.device)
    ends = torch.full((len(weights),), 8, dtype=torch.int32, device=weights.device)
    ends[0] = 3
    try:
        torch.testing.assert_close(grouped(tokens, weights, ends), _loop(tokens, weights, ends), rtol=2e-2, atol=2e-2)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
        return f"loop: {name}: {str(error).splitlines()[0]}", _loop
    return name, grouped


def _grouped() -> tuple[str, _Product | None]:
    public = getattr(F, "grouped_mm", None)
    product = public or getattr(torch, "_grouped_mm", None)
    if product is None:
        return "", None
    return (
        "torch.nn.functional.grouped_mm" if public else "torch._grouped_mm",
        lambda tokens, weights, ends: product(tokens, weights.transpose(1, 2), offs=ends),
    )


def _loop(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    parts, start = [], 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        parts.append(F.linear(tokens[start:end], weight))
        start = end
    return torch.cat(parts)
