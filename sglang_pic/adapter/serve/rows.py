"""Where the rows of a donor's path are: on the device, on the host, in a pool for sliding windows.

A path in the tree has rows on the device up to some token. On servers with HiCache the `RowTier` has those after it in
host memory, `WindowRows` those of layers with sliding windows in a pool of their own. A `Piece` is what a plan takes of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol

import torch

from sglang_pic.core import CostModel, Run, Span

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from sglang_pic.runtime.splice import Splicer


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


class OffDevice(NamedTuple):
    """The rows of a path that are not on the device."""

    node: Any
    """The tree's node at the end of the rows on the device."""
    slots: torch.Tensor = _NO_SLOTS
    """Host slots of the rows after them, int64, in host memory."""
    nodes: Sequence[Any] = ()
    """The tree's nodes of all rows on the host."""
    windows: Sequence[WindowsOnHost] = ()
    """Window rows that are on the host alone, also where other rows are on the device; ascending."""


class Place(IntEnum):
    """Where the rows of a piece are; a batch copies them in this order."""

    DEVICE = 0
    WINDOWS_ON_HOST = 1
    """On the device, but for their window rows."""
    HOST = 2


class Piece(NamedTuple):
    """A part of a run whose rows are in one place: tokens `[start, end)` of the prompt."""

    run: Run
    start: int
    end: int
    shift: int
    """Positions by which the keys are rotated; with M-RoPE less than the run's shift where images were moved."""
    slots: torch.Tensor
    """Of the donor's rows, int64, on the device; with `Place.HOST` of the host's pool, in host memory."""
    place: Place = Place.DEVICE
    windows: torch.Tensor | None = None
    """The slots of their window rows, if these have a pool: the device's with `Place.DEVICE`, else the host's."""
    on_device: OnDevice | None = None
    """The place of `slots` in the tree; None if they are in no path."""

    def until(self, end: int) -> Piece:
        """The piece, or its part before a position of the prompt."""
        if self.end <= end:
            return self
        num_tokens = end - self.start
        windows = None if self.windows is None else self.windows[:num_tokens]
        return self._replace(end=end, slots=self.slots[:num_tokens], windows=windows)


def cut_pieces(
    run: Run, shift: int, here: torch.Tensor, on_host: OffDevice, windows: torch.Tensor | None = None
) -> list[Piece]:
    """The pieces of a run, in order, cut where its rows or their window rows lie elsewhere.

    Args:
        run: of a plan.
        shift: positions by which its keys are rotated.
        here: slots of all rows of the donor's path that are on the device.
        on_host: the others.
        windows: slots of the window rows of those of the run's rows that are on the device, if these have a pool;
            read only where they are there.
    """
    start, end, num_here, pieces = run.donor_start, run.donor_end, len(here), []
    assert end <= num_here + len(on_host.slots), (num_here, len(on_host.slots), start, end)
    edges = {start, end, num_here, *(edge for each in on_host.windows for edge in each[:2])}
    for first, last in pairwise(sorted(edge for edge in edges if start <= edge <= end)):
        place, slots = Place.DEVICE, here[first:last]
        if first >= num_here:
            place, slots = Place.HOST, on_host.slots[first - num_here : last - num_here]
        own = None if windows is None else windows[first - start : last - start]
        for each in on_host.windows:
            if each.start <= first < each.end:
                place, own = max(place, Place.WINDOWS_ON_HOST), each.slots[first - each.start : last - each.start]
        assert own is None or len(own) == last - first, "a row on the host has its window row there, too"
        on_device = None if place is Place.HOST else OnDevice(on_host.node, first, last)
        pieces.append(Piece(run, first + run.shift, last + run.shift, shift, slots, place, own, on_device))
    return pieces


@dataclass(slots=True)
class Splice:
    """The rows to copy before the pass, as `Splicer.splice` takes them, or `Splicer.fetch`: all are `[num_tokens]`."""

    src: torch.Tensor
    """On the pool's device; of the host's pool in host memory, likewise `windows`."""
    dst: torch.Tensor
    shifts: torch.Tensor
    windows: torch.Tensor | None = None


class Reads(Protocol):
    """What a pass reads of donors' rows."""

    splice: Splice
    """From the device."""
    fetch: Splice | None
    """From the host."""
    donors: list[OnDevice]
    """The rows of `splice`."""
    locks: ExitStack
    """Of all of them."""


class RowTier:
    """Where rows are beside the device: nowhere; HiCache adds host memory (`HostTier`)."""

    has_host: ClassVar[bool] = False

    def priced(self, cost: CostModel) -> CostModel:
        """Measured costs, with the price of reading a row from there."""
        return cost

    def find(self, match: Any) -> OffDevice:
        """The rows on the host of a match of the tree, without `windows`."""
        return OffDevice(match.last_device_node)

    def lock(self, found: OffDevice, locks: ExitStack) -> None:
        """Lock the rows on the host until `locks` is closed."""

    def read(self, reads: Reads, splicers: Sequence[Splicer]) -> None:
        """Queue the copy of a pass's donors on the current stream; may take over their locks."""
        for splicer in splicers:
            splicer.splice(reads.splice.src, reads.splice.dst, reads.splice.shifts, reads.splice.windows)


ON_DEVICE: Final = RowTier()
"""The tier of servers without HiCache."""


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
