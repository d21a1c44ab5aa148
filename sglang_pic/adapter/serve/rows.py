"""Where the rows of a donor's path are: on the device, on the host, in a pool for sliding windows.

A path in the tree has rows on the device up to some token. `HostRows` has the rows after it in host memory,
`WindowRows` those of layers with sliding windows in a pool of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from sglang_pic.core import Span

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey


_NO_SLOTS: Final = torch.empty(0, dtype=torch.int64)


class OnDevice(NamedTuple):
    """Rows `[start, end)` of the path to a node of the tree, on the device or being loaded to it."""

    node: Any
    start: int
    end: int


class WindowsOnHost(NamedTuple):
    """Window rows `[start, end)` of a path in host memory."""

    start: int
    end: int
    slots: torch.Tensor
    """Slots of the host's pool for windows, int64, in host memory."""

    def num_within(self, start: int, end: int) -> int:
        """How many of the rows are in `[start, end)`."""
        return max(0, min(end, self.end) - max(start, self.start))

    def cut(self, start: int, end: int) -> WindowsOnHost:
        """Those of the rows in `[start, end)`, counted from `start`."""
        first, last = max(start, self.start), min(end, self.end)
        return WindowsOnHost(first - start, last - start, self.slots[first - self.start : last - self.start])


class OnHost(NamedTuple):
    """The rows of a path that are not on the device."""

    node: Any
    """The tree's node at the end of the rows on the device."""
    slots: torch.Tensor = _NO_SLOTS
    """Host slots of the rows after them, int64, in host memory."""
    nodes: Sequence[Any] = ()
    """The tree's nodes of all rows on the host."""
    windows: Sequence[WindowsOnHost] = ()
    """Window rows that are on the host alone, also where other rows are on the device; ascending."""


class Rows(NamedTuple):
    """The slots of a span of a path, such as a run's donor."""

    slots: torch.Tensor
    """Slots of the first tokens, on the pool's device, int64."""
    on_device: OnDevice | None = None
    """The place of `slots` in the tree; None if they are in no path."""
    host_slots: torch.Tensor | None = None
    """Host slots of the other tokens, int64, in host memory."""
    window_slots: torch.Tensor | None = None
    """Slots of the same tokens as `slots` in the pool for windows, if there is one; 0 for those on the host."""
    windows_on_host: Sequence[WindowsOnHost] = ()
    """Window rows on the host, counted from the span's start; among them those of all `host_slots`."""
    turn: int | None = None
    """Positions by which the keys are rotated; None for the run's shift."""


class HostRows(Protocol):
    """Rows in host memory, which a splice reads directly."""

    def find(self, match: Any) -> OnHost:
        """The rows on the host of a match of the tree, without `windows`."""

    def lock(self, found: OnHost, locks: ExitStack) -> None:
        """Lock the rows until `locks` is closed."""

    def wait_for_loads(self, stream: Any, donors: Sequence[OnDevice]) -> None:
        """Have a stream wait for loads that write donors' rows on the device."""

    def hold(self, locks: ExitStack, num_tokens: int, events: tuple[Any, Any]) -> None:
        """Close `locks` when the work of the current stream between two events is done on all ranks."""


class WindowRows(Protocol):
    """Rows of layers with sliding windows, in a pool of their own."""

    def holes(self, key: RadixKey, end: int) -> Sequence[Span]:
        """The spans of the first `end` tokens of a path whose window rows left the device, ascending."""

    def on_host(self, node: Any, holes: Sequence[Span]) -> tuple[list[WindowsOnHost], list[Any]]:
        """What of `holes` in the path to a node is on the host, ascending, and its nodes; on servers with HiCache."""

    def lock(self, node: Any, start: int, end: int, locks: ExitStack) -> None:
        """Lock the window rows of `[start, end)` on the path to `node`, which is locked, until `locks` is closed."""

    def slots(self, slots: torch.Tensor) -> torch.Tensor:
        """The window slots of resident, locked rows, int64."""
