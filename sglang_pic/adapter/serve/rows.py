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


class OnDevice(NamedTuple):
    """Rows `[start, end)` of the path to a node of the tree, on the device or being loaded to it."""

    node: Any
    start: int
    end: int


class OnHost(NamedTuple):
    """The rows after a path's part on the device: host slots, int64, in host memory, and the tree's nodes."""

    slots: torch.Tensor
    nodes: list[int]


NOTHING: Final = OnHost(torch.empty(0, dtype=torch.int64), [])


class Rows(NamedTuple):
    """The slots of a span of a path, such as a run's donor."""

    slots: torch.Tensor
    """Slots of the first tokens, on the pool's device, int64."""
    on_device: OnDevice | None = None
    """The place of `slots` in the tree; None if they are in no path."""
    host_slots: torch.Tensor | None = None
    """Host slots of the other tokens, int64, in host memory."""
    window_slots: torch.Tensor | None = None
    """Slots of the same tokens as `slots` in the pool for windows, if there is one; then nothing is on the host."""
    turn: int | None = None
    """Positions by which the keys are rotated; None for the run's shift."""


class HostRows(Protocol):
    """Rows in host memory, which a splice reads directly."""

    def find(self, match: Any) -> OnHost:
        """The rows on the host of a match of the tree."""

    def lock(self, found: OnHost, locks: ExitStack) -> None:
        """Lock the rows until `locks` is closed."""

    def wait_for_loads(self, stream: Any, donors: Sequence[OnDevice]) -> None:
        """Have a stream wait for loads that write donors' rows on the device."""

    def hold(self, locks: ExitStack, num_tokens: int, events: tuple[Any, Any]) -> None:
        """Close `locks` when the work of the current stream between two events is done on all ranks."""


class WindowRows(Protocol):
    """Rows of layers with sliding windows, in a pool of their own."""

    def holes(self, key: RadixKey, end: int) -> Sequence[Span]:
        """The spans of the first `end` tokens of a path whose window rows were evicted, ascending."""

    def lock(self, node: Any, start: int, end: int, locks: ExitStack) -> None:
        """Lock the window rows of `[start, end)` on the path to `node`, which is locked, until `locks` is closed."""

    def slots(self, slots: torch.Tensor) -> torch.Tensor:
        """The window slots of resident, locked rows, int64."""
