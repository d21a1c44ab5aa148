"""The rows of donors: where they are, and how a plan finds, locks and cuts them.

A path in the tree has rows on the device up to some token. On servers with HiCache the `RowTier` has those after it in
host memory, `WindowRows` those of layers with sliding windows in a pool of their own. `TreeRows` matches a donor's path
again, which proves that its rows are resident and refreshes their age, and locks them until they have been copied. A
`Piece` is what a plan takes of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol

import numpy as np
import torch

from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.sglang.seams import Req, Tree
from sglang_pic.core import (
    CostModel,
    Path,
    PositionSteps,
    RowNames,
    RowSource,
    Run,
    Span,
    Tokens,
    intersect_spans,
)

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


class WindowRows:
    """Rows of layers with sliding windows in a pool of their own: here none; `WindowRowsInTree` has some."""

    def find(
        self, key: RadixKey, match: Any, end: int, found: OffDevice, *, has_host: bool
    ) -> tuple[OffDevice, Sequence[Span]]:
        """Add the window rows on the host to the rows found of a match.

        Args:
            key: of the path.
            match: of the tree.
            end: tokens of the path that have other rows.
            found: those of them that are not on the device.
            has_host: whether the server has HiCache.

        Returns:
            All rows that are not on the device, and the spans of the path that have no window rows, ascending.
        """
        return found, ()

    def take(self, found: OffDevice, run: Run, slots: torch.Tensor, locks: ExitStack) -> torch.Tensor | None:
        """The window slots of a run's rows on the device, int64, which are locked until `locks` is closed.

        Those of rows on the host are 0; None without a pool.

        Args:
            found: rows of the donor's path that are not on the device; the path is locked.
            run: of a plan.
            slots: of all rows of the path on the device.
            locks: gets the locks.
        """
        return None

    def lock(self, node: Any, start: int, end: int, locks: ExitStack) -> None:
        """Lock the window rows of `[start, end)` on the path to `node`, which is locked, until `locks` is closed."""


NO_WINDOWS: Final = WindowRows()
"""On servers whose layers have one pool."""


class Media(NamedTuple):
    """The images of one prompt, in order."""

    spans: tuple[Span, ...]
    """Their positions."""
    firsts: tuple[int, ...]
    """Their first core tokens; the others count up from there."""

    def over(self, tokens: Tokens) -> Tokens:
        """Replace the images' ids in the first tokens of the prompt by core tokens, in place; returns `tokens`."""
        for (start, end), first in zip(self.spans, self.firsts, strict=True):
            tokens[start:end] = np.arange(first, first + len(tokens[start:end]), dtype=tokens.dtype)
        return tokens


class TextOnly:
    """A server that moves no images: requests with media are computed."""

    def read(self, req: Req) -> Media | None:
        """The images of a request with media; `None` if it cannot be spliced."""
        return None

    def ids(self, tokens: Tokens) -> array[int]:
        """SGLang's ids of a path of core tokens."""
        return array("q", tokens.astype(np.int64).tobytes())

    def shifts(self, runs: Sequence[Run], tokens: Tokens) -> list[int]:
        """The positions by which each run's keys are rotated."""
        return [run.shift for run in runs]


class _Resident(NamedTuple):
    """A matched path: how many leading tokens are resident, how many rows are on the device, and its lock."""

    length: int
    num_here: int
    on_host: OffDevice
    """The rows on the host."""
    unlock: Callable[[], object]
    holes: Sequence[Span] = ()
    """Spans without window rows, on the device and on the host."""
    slots: torch.Tensor | None = None
    """Of the rows on the device, int64; None until a plan has the path."""


class ResolveError(Exception):
    """Resolving a donor failed; see its cause."""


class TreeRows(RowSource):
    """The rows of SGLang's tree, for one request's plans and donors of any `Namespace`.

    It locks them until `transfer_locks` or `release`. Rows on the host are resident, too. A tree for a draft model of
    EAGLE's kind identifies a row by its token and the next one, so the last token of a path has no row.
    """

    def __init__(
        self,
        tree: Tree,
        names: RowNames,
        tier: RowTier,
        windows: WindowRows = NO_WINDOWS,
        *,
        media: TextOnly | None = None,
        pinned_len: Callable[[Path], int] | None = None,
        steps: Sequence[PositionSteps] = (),
        whole: Sequence[Span] = (),
    ) -> None:
        super().__init__(steps=steps, whole=whole)
        self._tree, self._names, self._tier, self._windows = tree, names, tier, windows
        self._media, self._pinned_len = media or TextOnly(), pinned_len
        self._found: dict[Path, _Resident] = {}

    def num_resident(self, path: Path, end: int) -> int:
        """As `RowSource`; the rows are locked.

        Raises:
            ResolveError: matching or locking failed.
        """
        known = self._found.get(path)
        if known is not None and known.length >= end:
            return known.length
        with _looking_up(path):
            return self._find(path, end, known)

    def _find(self, path: Path, end: int, known: _Resident | None) -> int:
        # Not earlier: the doctor imports this module before SGLang may look for its platform.
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        # The tree matches whole pages: match to the end of the last token's page. A path that is resolved again has
        # several runs: it is matched to its end, once.
        page_size, beyond = self._names
        wanted = -(-(end - beyond) // page_size) * page_size + beyond
        tokens = path.tokens(min(wanted, len(path)) if known is None else None)
        namespace = path.namespace
        assert isinstance(namespace, Namespace), "publication.py names namespaces"
        key = RadixKey(self._media.ids(tokens), namespace.extra_key, cache_salt=namespace.cache_salt)
        result = self._tree.match_prefix(MatchPrefixParams(key=key))
        on_host = self._tier.find(result)
        # NOTE: most candidates are left out of the plan, and collecting slots is work for the device.
        (on_path,) = self._tree.tree_core.collect_path_info([on_host.node])
        num_here = sum(each.full_value_len or 0 for each in on_path)
        num_rows = num_here + len(on_host.slots)
        length = num_rows + beyond if num_rows else 0
        on_host, holes = self._windows.find(key, result, num_rows, on_host, has_host=self._tier.has_host)
        # NOTE: the path is locked at every moment, and has exactly one lock if an exception is raised.
        self._found[path] = _Resident(length, num_here, on_host, self._lock(on_host), holes)
        if known is not None:
            known.unlock()
        return length

    def _lock(self, found: OffDevice) -> Callable[[], object]:
        """Lock the rows of a match, on the device and on the host; returns the function that unlocks them."""
        unlock = partial(self._tree.unlock, self._tree.lock(found.node))
        if not found.nodes:
            return unlock
        with ExitStack() as locks:
            locks.callback(unlock)
            self._tier.lock(found, locks)
            return locks.pop_all().close

    def num_to_fetch(self, path: Path, start: int, end: int) -> int:
        """How many rows of a resident span are on the host, or their window rows."""
        found = self._found[path]
        in_windows = sum(each.num_within(start, end) for each in found.on_host.windows)
        return max(in_windows, end - max(start, min(end, found.num_here)))

    def holes(self, path: Path, start: int, end: int) -> Sequence[Span]:
        """The parts of a resident span without window rows, on the device and on the host."""
        return intersect_spans(self._found[path].holes, start, end)

    def pinned_len(self, path: Path) -> int:
        return 0 if self._pinned_len is None else self._pinned_len(path)

    def pieces(self, run: Run, shift: int) -> list[Piece]:
        """The pieces of a run whose donor is resolved, in order, cut where its rows or their window rows lie elsewhere.

        Args:
            run: of the plan.
            shift: positions by which its keys are rotated.

        Raises:
            ResolveError: locking window rows failed.
        """
        with _looking_up(run.donor):
            return self._pieces(run, shift)

    def _pieces(self, run: Run, shift: int) -> list[Piece]:
        found = self._found[run.donor]
        slots = found.slots
        if slots is None:
            slots = self._tree.path_device_indices(found.on_host.node).to(torch.int64)
        assert not self.holes(run.donor, run.donor_start, run.donor_end), "the planner leaves holes out"
        with ExitStack() as both:
            windows = self._windows.take(found.on_host, run, slots, both)
            both.callback(found.unlock)
            self._found[run.donor] = found._replace(slots=slots, unlock=both.pop_all().close)
        return cut_pieces(run, shift, slots, found.on_host, windows)

    def transfer_locks(self, paths: list[Path]) -> ExitStack:
        """The locks of `paths`, each once, which the caller closes; all others are released."""
        kept, locks = set(paths), ExitStack()
        for path in list(self._found):
            found = self._found.pop(path)
            if path in kept:
                locks.callback(found.unlock)
            else:
                found.unlock()
        return locks

    def release(self) -> None:
        """Release all locks."""
        self.transfer_locks([]).close()


@contextmanager
def _looking_up(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ResolveError(f"a donor's path of {len(path)} tokens: {error}") from error
