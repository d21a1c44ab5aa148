"""What this plugin shows in `/server_info`: one entry `pic` in the internal state of each scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sglang_pic.adapter.hooks import hook


def install(parts: Mapping[str, Callable[[], msgspec.Struct]], dp_rank: int | None) -> None:
    """Register the hook.

    Args:
        parts: what reads each part of the entry, by name; called on the scheduler's thread at every request for
            `/server_info`, so it must be quick. Parts may be added later.
        dp_rank: which of several ranks or replicas that serve requests of their own this is; `None` where there is one.
    """
    rank = {} if dp_rank is None else {"dp_rank": dp_rank}

    def add_entry(output: Any, _controller: object, _request: object) -> None:
        output.internal_state["pic"] = rank | {name: msgspec.to_builtins(read()) for name, read in parts.items()}

    controller = "managers.scheduler_components.internal_state.SchedulerInternalStateController"
    hook("after", f"{controller}.get_internal_state", add_entry)
