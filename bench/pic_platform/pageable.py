"""Pinned memory on the platform: it is ordinary memory, because only an accelerator's driver pins any."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def without_pinned_memory() -> None:
    """Have torch ignore that memory is to be pinned; idempotent."""
    if hasattr(torch.empty, "__wrapped__"):
        return
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _pageable(getattr(torch, name)))


def _pageable(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return made
