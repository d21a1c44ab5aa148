"""The rows of donors: where they are, and how a plan finds, locks and cuts them.

A path in the tree has rows on the device up to some token. `TreeRows` matches a donor's path again, which proves that
its rows are resident and refreshes their age, and locks them until they have been copied. A `Piece` is what a plan
takes of them. The `RowTier` of a server says where a path has rows; a kind of rows with places of its own is a subclass
in a feature's module, as HiCache's host memory and the pool for sliding windows are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

import torch

from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.probe.copies import keep_until_read
from sglang_pic.adapter.serve.media import TextOnly
from sglang_pic.adapter.sglang.seams import Tree
from sglang_pic.core import CostModel, Path, PositionSteps, RowNames, RowSource, Run, Span, intersect_spans

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from sglang_pic.runtime.splice import Splicer


NO_SLOTS: Final = torch.empty(0, dtype=torch.int64)


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
    node: Any = None
    """The tree's node at the end of the path with `slots`; None if they are on the host, or in no path."""

    def part(self, start: int, end: int) -> Piece:
        """The piece from `start` on and before `end`, which are positions of the prompt inside it."""
        if (start, end) == (self.start, self.end):
            return self
        cut = slice(start - self.start, end - self.start)
        windows = None if self.windows is None else self.windows[cut]
        return self._replace(start=start, end=end, slots=self.slots[cut], windows=windows)


Placed: TypeAlias = tuple[Piece, torch.Tensor]
"""A piece, and the slots that it is written to."""


@dataclass(slots=True)
class Splice:
    """The rows to copy before the pass, as `Splicer.splice` takes them, or `Fetcher.fetch`: all are `[num_tokens]`."""

    src: torch.Tensor
    """On the pool's device; of the host's pool in host memory, likewise `windows`."""
    dst: torch.Tensor
    shifts: torch.Tensor
    windows: torch.Tensor | None = None


@dataclass(slots=True)
class Reads:
    """What a pass reads of donors' rows."""

    splice: Splice
    """From the device."""
    fetch: Splice | None = None
    """From the host."""

    def queue(self, splicers: Sequence[Splicer], locks: ExitStack) -> None:
        """Queue the copies on the current stream; `locks`, of the donors, may be taken over."""
        for splicer in splicers:
            splicer.splice(self.splice.src, self.splice.dst, self.splice.shifts, self.splice.windows)


@dataclass(frozen=True, slots=True)
class Found:
    """The rows of a matched path."""

    node: Any
    """The tree's node at the end of the rows on the device."""
    num_rows: int
    """How many leading tokens have rows."""
    slots: torch.Tensor = NO_SLOTS
    """Host slots of those that are not on the device, int64, in host memory."""
    nodes: Sequence[Any] = ()
    """The tree's nodes of all rows on the host."""
    holes: Sequence[Span] = ()
    """Spans of which some layers have no rows, ascending."""
    windows: Sequence[Any] = ()
    """Window rows that are on the host alone, also where other rows are on the device; ascending, by `WindowTier`."""


def on_device(tree: Tree, node: Any) -> Found:
    """The rows on the device of the path to a node."""
    # NOTE: most candidates are left out of the plan, and collecting slots is work for the device.
    (path,) = tree.tree_core.collect_path_info([node])
    return Found(node, sum(each.full_value_len or 0 for each in path))


class RowTier:
    """Where rows are: on the device alone."""

    has_host: ClassVar[bool] = False

    def priced(self, cost: CostModel) -> CostModel:
        """Measured costs, with the price of reading a row from elsewhere."""
        return cost

    def find(self, tree: Tree, key: RadixKey, match: Any) -> Found:
        """The rows of a match of the tree for a path with this key."""
        return on_device(tree, match.last_device_node)

    def lock(self, found: Found, locks: ExitStack) -> None:
        """Lock the rows that are not on the device until `locks` is closed."""

    def num_to_fetch(self, found: Found, start: int, end: int) -> int:
        """How many rows of a span are read from elsewhere."""
        return 0

    def pieces(self, found: Found, run: Run, shift: int, here: torch.Tensor, locks: ExitStack) -> list[Piece]:
        """The pieces of a run, in order, cut where its rows lie elsewhere.

        Args:
            found: rows of the donor's path, which are locked.
            run: of a plan.
            shift: positions by which its keys are rotated.
            here: slots of all rows of the path that are on the device.
            locks: gets the locks on rows that are not locked with the path.
        """
        start, end = run.donor_start, min(run.donor_end, len(here))
        if start >= end:
            return []
        return [Piece(run, start + run.shift, end + run.shift, shift, here[start:end], node=found.node)]

    def gather(self, placed: Sequence[Placed], shifts: torch.Tensor) -> Reads:
        """What a pass reads of the pieces of its requests.

        Args:
            placed: the pieces in the order of their places.
            shifts: of each of their tokens, `[num_tokens]` int64, on the pool's device.
        """
        if not placed:
            return Reads(Splice(shifts, shifts, shifts))
        for piece, _ in placed:
            keep_until_read(piece.slots)
        dst = torch.cat([dst for _, dst in placed]).to(torch.int64)
        return Reads(Splice(torch.cat([piece.slots for piece, _ in placed]), dst, shifts))


ON_DEVICE: Final = RowTier()
"""The tier of servers without HiCache, and without windows in a pool of their own."""


class _Resident(NamedTuple):
    """A matched path: how many leading tokens are resident, its rows, and its lock."""

    length: int
    rows: Found
    unlock: Callable[[], object]
    slots: torch.Tensor | None = None
    """Of the rows on the device, int64; None until a plan has the path."""


class ResolveError(Exception):
    """Resolving a donor failed; see its cause."""


class TreeRows(RowSource):
    """The rows of SGLang's tree, for one request's plans and donors of any `Namespace`.

    It locks them until `transfer_locks` or `release`. Rows elsewhere than on the device are resident, too. A tree for a
    draft model of EAGLE's kind identifies a row by its token and the next one, so the last token of a path has no row.
    """

    def __init__(
        self,
        tree: Tree,
        names: RowNames,
        tier: RowTier,
        *,
        media: TextOnly | None = None,
        pinned_len: Callable[[Path], int] | None = None,
        steps: Sequence[PositionSteps] = (),
        whole: Sequence[Span] = (),
    ) -> None:
        super().__init__(steps=steps, whole=whole)
        self._tree, self._names, self._tier = tree, names, tier
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
        rows = self._tier.find(self._tree, key, self._tree.match_prefix(MatchPrefixParams(key=key)))
        length = rows.num_rows + beyond if rows.num_rows else 0
        # NOTE: the path is locked at every moment, and has exactly one lock if an exception is raised.
        self._found[path] = _Resident(length, rows, self._lock(rows))
        if known is not None:
            known.unlock()
        return length

    def _lock(self, rows: Found) -> Callable[[], object]:
        """Lock the rows of a match, wherever they are; returns the function that unlocks them."""
        with ExitStack() as locks:
            locks.callback(self._tree.unlock, self._tree.lock(rows.node))
            self._tier.lock(rows, locks)
            return locks.pop_all().close

    def num_to_fetch(self, path: Path, start: int, end: int) -> int:
        """How many rows of a resident span are read from elsewhere than the device."""
        return self._tier.num_to_fetch(self._found[path].rows, start, end)

    def holes(self, path: Path, start: int, end: int) -> Sequence[Span]:
        """The parts of a resident span of which some layers have no rows."""
        return intersect_spans(self._found[path].rows.holes, start, end)

    def pinned_len(self, path: Path) -> int:
        return 0 if self._pinned_len is None else self._pinned_len(path)

    def pieces(self, run: Run, shift: int) -> list[Piece]:
        """The pieces of a run whose donor is resolved, in order, cut where its rows lie elsewhere.

        Args:
            run: of the plan.
            shift: positions by which its keys are rotated.

        Raises:
            ResolveError: locking rows failed.
        """
        with _looking_up(run.donor):
            return self._pieces(run, shift)

    def _pieces(self, run: Run, shift: int) -> list[Piece]:
        found = self._found[run.donor]
        slots = found.slots
        if slots is None:
            slots = self._tree.path_device_indices(found.rows.node).to(torch.int64)
        assert run.donor_end <= found.rows.num_rows, (found.rows.num_rows, run.donor_start, run.donor_end)
        assert not self.holes(run.donor, run.donor_start, run.donor_end), "the planner leaves holes out"
        with ExitStack() as both:
            pieces = self._tier.pieces(found.rows, run, shift, slots, both)
            both.callback(found.unlock)
            self._found[run.donor] = found._replace(slots=slots, unlock=both.pop_all().close)
        return pieces

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
