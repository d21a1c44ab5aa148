"""The plugin's entry `pic` in `/server_info`, one for each scheduler, and its keys of `/set_internal_state`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from sglang_pic import __version__
from sglang_pic.adapter.sglang.hooks import hook
from sglang_pic.config import PicConfig

SWITCHES: Final = {
    "pic_mode": "0 (off) or 1 (auto)",
    "pic_audit_resume": "the number of a suspended namespace in /server_info, 0 for all",
}
"""Our keys of `/set_internal_state`, each with what it takes, for the front end's answers."""


def install(
    config: PicConfig,
    parts: Mapping[str, Callable[[], msgspec.Struct]],
    of_features: Callable[[], Mapping[str, msgspec.Struct]],
    dp_rank: int | None,
) -> None:
    """Register the hook.

    Args:
        config: shown without its secrets.
        parts: functions that return each part of the entry, by name; called on the scheduler's thread at every request
            for `/server_info`, so they must be quick. Parts may be added later.
        of_features: returns the features' parts, likewise.
        dp_rank: this rank or replica among those that serve requests of their own; `None` if there is one.
    """
    first: dict[str, Any] = {"version": __version__, "config": msgspec.to_builtins(config.without_secrets())}
    if dp_rank is not None:
        first["dp_rank"] = dp_rank

    def add_entry(output: Any, _controller: object, _request: object) -> None:
        shown = {**of_features()} | {name: read() for name, read in parts.items()}
        output.internal_state["pic"] = first | {name: msgspec.to_builtins(part) for name, part in shown.items()}

    hook(__name__, "SchedulerInternalStateController.get_internal_state", add_entry)


def take(key: str, refuse: Callable[[float], str], apply: Callable[[float], None]) -> None:
    """Register a hook that adds a key to `/set_internal_state`, which takes numbers and is sent to every rank.

    Args:
        key: its name.
        refuse: returns why a number is refused, in one clause, or an empty text.
        apply: called on the scheduler's thread, between two rounds.
    """

    def handlers(known: dict[str, Any], _controller: object) -> dict[str, Any]:
        from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler

        def validate(_: str, value: float) -> None:
            if reason := refuse(value):
                raise UpdateRejected(f"{key}={value!r}: {reason}")

        return {**known, key: _UpdateHandler(validate, lambda _, value: apply(value))}

    hook(__name__, "SchedulerInternalStateController._update_handlers", handlers)
