"""Hooks on functions of SGLang, and the proof that each one is in place."""

from __future__ import annotations

import pkgutil
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from sglang_pic.errors import ContractError

HOOKS: Final[Mapping[str, Mapping[str, str]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf8"))
"""By our modules the functions of SGLang that they wrap, each with the moment."""

_registered: list[tuple[str, Callable[..., Any]]] = []
"""What this process registered, `(target, function)`; as SGLang's own registry it only grows."""


def hook(owner: str, name: str, function: Callable[..., Any]) -> None:
    """Register a hook of `hooks.toml`; SGLang wraps the target when all plugins have run, or when its registry is
    applied again. `before` and `after` are called as `function(*args)` and `function(result, *args)`, where an answer
    other than `None` replaces the result; `around` as `function(original, *args)`.

    Args:
        owner: the `__name__` of the module that the table has the hook under.
        name: the end of the target's path, which is the only one of the owner's that ends so; nothing is imported.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target, when = listed(owner, name)
    HookRegistry.register(f"sglang.srt.{target}", function, HookType(when))
    _registered.append((f"sglang.srt.{target}", function))


def listed(owner: str, name: str) -> tuple[str, str]:
    """The path and the moment that the table has for a hook."""
    rows = HOOKS[owner.removeprefix("sglang_pic.adapter.")].items()
    (found,) = ((path, when) for path, when in rows if f".{path}".endswith(f".{name}"))
    return found


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
