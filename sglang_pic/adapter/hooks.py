"""Hooks on functions of SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal


def hook(when: Literal["before", "after", "around"], target: str, function: Callable[..., Any]) -> None:
    """Register a hook; SGLang wraps the target when all plugins have run, or when its registry is applied again.

    Args:
        when: `before` calls `function(*args)` first, `after` calls `function(result, *args)` and replaces the result by
            what comes back unless that is `None`, `around` calls `function(original, *args)` instead.
        target: the path below `sglang.srt`; nothing of it is imported.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"sglang.srt.{target}", function, HookType(when))
