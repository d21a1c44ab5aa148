"""Where the rows of a donor's path are: on the device, and on what a feature adds to it.

A path that is in the tree has rows on the device up to some token. `HostRows` has those behind them in host memory,
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
    """Rows `[start, end)` of the path to a node of the tree, which the device has or is being given."""

    node: Any
    start: int
    end: int


class OnHost(NamedTuple):
    """What follows the device's part of a path: host slots in int64, in host memory, and the tree's nodes."""

    slots: torch.Tensor
    nodes: list[int]


NOTHING: Final = OnHost(torch.empty(0, dtype=torch.int64), [])


class Rows(NamedTuple):
    """Where the rows of a run, or of any span of a path, are."""

    slots: torch.Tensor
    """Of the first tokens, on the pool's device, int64."""
    on_device: OnDevice | None = None
    """Where `slots` are in the tree; None where they are of nobody's path."""
    host_slots: torch.Tensor | None = None
    """The host's slots of the rest, int64, in host memory."""
    window_slots: torch.Tensor | None = None
    """Of the same tokens as `slots`, read while the donor was locked, where windows have a pool of their own. Nothing
    is on the host then."""
    turn: int | None = None
    """By how many positions the keys turn; None where that is the run's shift. Nothing is on the host otherwise."""


class HostRows(Protocol):
    """Rows in host memory, which a splice reads where they are."""

    def find(self, match: Any) -> OnHost:
        """What a match of the tree's found on the host."""

    def lock(self, found: OnHost, locks: ExitStack) -> None:
        """Keep the rows where they are until `locks` is closed."""

    def wait_for_loads(self, stream: Any, donors: Sequence[OnDevice]) -> None:
        """Have a stream wait for loads that write rows of donors on the device."""

    def hold(self, locks: ExitStack, num_tokens: int, events: tuple[Any, Any]) -> None:
        """Close `locks` when the work of the current stream between two events is done on all ranks."""


class WindowRows(Protocol):
    """Rows of layers with sliding windows, in a pool of their own."""

    def holes(self, key: RadixKey, end: int) -> Sequence[Span]:
        """The spans of the first `end` tokens of a path whose window rows are gone, ascending."""

    def lock(self, node: Any, start: int, end: int, locks: ExitStack) -> None:
        """Keep the window rows of `[start, end)` on the path to `node`, which is locked, until `locks` is closed."""

    def slots(self, slots: torch.Tensor) -> torch.Tensor:
        """The window slots of rows that are there and locked, int64."""
