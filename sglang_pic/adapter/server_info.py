"""What this plugin shows in `/server_info`: one entry `pic` in the internal state of each scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sglang_pic.adapter.hooks import hook


class ServerInfo:
    """The parts of the entry `pic`, by name; read anew at every request for `/server_info`."""

    def __init__(self) -> None:
        self._parts: dict[str, Callable[[], msgspec.Struct]] = {}

    def add(self, name: str, read: Callable[[], msgspec.Struct]) -> None:
        """Show what `read` returns under `name`; it is called on the scheduler's thread and must be quick."""
        assert name not in self._parts, name
        self._parts[name] = read

    def read(self) -> dict[str, Any]:
        """The entry, in JSON's own types."""
        return {name: msgspec.to_builtins(read()) for name, read in self._parts.items()}

    def install(self) -> None:
        """Register the hook; SGLang applies it when its registry is applied."""
        controller = "managers.scheduler_components.internal_state.SchedulerInternalStateController"
        hook("after", f"{controller}.get_internal_state", self._add_entry)

    def _add_entry(self, output: Any, _controller: object, _request: object) -> None:
        output.internal_state["pic"] = self.read()
