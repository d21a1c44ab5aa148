"""Hooks on functions of SGLang, and the proof that each one is in place."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any, Literal

from sglang_pic.errors import ContractError

_registered: list[tuple[str, Callable[..., Any]]] = []
"""What this process registered, `(target, function)`; as SGLang's own registry it only grows."""


def hook(when: Literal["before", "after", "around"], target: str, function: Callable[..., Any]) -> None:
    """Register a hook; SGLang wraps the target when all plugins have run, or when its registry is applied again.

    Args:
        when: `before` calls `function(*args)` first, `after` calls `function(result, *args)` and replaces the result by
            what comes back unless that is `None`, `around` calls `function(original, *args)` instead.
        target: the path below `sglang.srt`; nothing of it is imported.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"sglang.srt.{target}", function, HookType(when))
    _registered.append((f"sglang.srt.{target}", function))


def apply_hooks() -> None:
    """Have SGLang wrap every target, and prove that each hook of this process is in place.

    Raises:
        ContractError: naming the targets that do not call their hooks.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    # NOTE: SGLang logs what goes wrong with a target and goes on, and passes over targets that it wrapped before.
    HookRegistry.apply_hooks()
    missing = sorted({target for target, function in _registered if not _calls(target, function)})
    if missing:
        raise ContractError(
            f"{', '.join(missing)}: not hooked, so requests would be served wrongly. Either another plugin hooked it "
            "first (SGLang hooks a function once), or the log above says what failed. Start without that plugin, or "
            "without --radix-cache-backend pic."
        )


def _calls(target: str, function: Callable[..., Any]) -> bool:
    """Whether `function` is among the wrappers around `target`."""
    try:
        found: Any = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    while found is not None:
        # SGLang's wrapper of a target closes over its hook and names what it wraps.
        if any(cell.cell_contents is function for cell in getattr(found, "__closure__", None) or ()):
            return True
        found = getattr(found, "__wrapped__", None)
    return False
