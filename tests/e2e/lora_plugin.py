"""A plugin of SGLang for servers with LoRA on a machine without an accelerator.

A server loads it where `tests/e2e/plugin` is on its `PYTHONPATH`. SGLang's LoRA keeps tables and weights in pinned
memory, which only an accelerator's driver gives; here they lie in ordinary memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final

from tests.backends.server_plugin import with_plugin

ENVIRONMENT: Final = with_plugin(Path(__file__).parent / "plugin")
"""What such a server is started with."""


def register() -> None:
    """Have torch ignore that memory is to be pinned."""
    import torch

    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _pageable(getattr(torch, name)))


def _pageable(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return made
