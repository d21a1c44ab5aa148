"""Registers hooks on functions of SGLang, and checks that each one is applied."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from sglang_pic.adapter.sglang.contract import HOOKS
from sglang_pic.errors import ContractError

_registered: list[tuple[str, Callable[..., Any]]] = []
"""The hooks of this process, `(target, function)`; like SGLang's own registry it only grows."""


def hook(owner: str, name: str, function: Callable[..., Any]) -> None:
    """Register a hook of `contract.toml`; SGLang applies it when all plugins have run, or when its registry is applied.

    Args:
        owner: the `__name__` of the module that the contract names.
        name: the end of the target's path, unique among the owner's.
        function: `before` is called as `function(*args)`; `after` as `function(result, *args)`, and may return another
            result or None; `around` as `function(original, *args)`.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target, when = listed(owner, name)
    HookRegistry.register(target, function, HookType(when))
    _registered.append((target, function))


def listed(owner: str, name: str) -> tuple[str, str]:
    """The target's path and `before`, `after` or `around`, of a hook."""
    rows = HOOKS[owner.removeprefix("sglang_pic.adapter.")].items()
    (found,) = ((path, when) for path, when in rows if f".{path}".endswith(f".{name}"))
    return found


def apply_hooks() -> None:
    """Have SGLang wrap every target, and check that each hook of this process is applied.

    Raises:
        ContractError: it names the targets that do not call their hooks.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    # NOTE: SGLang only logs a hook that it cannot apply, and skips targets that it wrapped before.
    HookRegistry.apply_hooks()
    missing = sorted({target for target, function in _registered if not _calls(target, function)})
    if missing:
        raise ContractError(
            f"{', '.join(missing)}: not hooked, so requests would be served wrongly. Another plugin may have hooked it "
            "first (SGLang hooks a function once); otherwise see the log above. Start without that plugin, or without "
            "--radix-cache-backend pic."
        )


def _calls(target: str, function: Callable[..., Any]) -> bool:
    """Whether `function` is among the wrappers around `target`."""
    try:
        found: Any = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    while found is not None:
        # SGLang's wrapper of a target has its hook in its closure, and the wrapped function in `__wrapped__`.
        if any(cell.cell_contents is function for cell in getattr(found, "__closure__", None) or ()):
            return True
        found = getattr(found, "__wrapped__", None)
    return False
