"""Features: what a server does beside the way of a request, each in a module of its own.

A feature overrides the moments that it needs. The way calls them through `Features`, in the order of the list, and
knows none by name; every rank calls them alike. An exception is raised to the caller, which has a fault for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.state import RequestState
from sglang_pic.adapter.sglang.seams import Req, Tree
from sglang_pic.core import PlanOptions

F = TypeVar("F", bound="Feature")


class PicTree(Tree, Protocol):
    """`serve/tree.py`'s, as features see it."""

    planning: Any
    publication: Any

    def is_outdated(self, req: Req) -> bool: ...

    def guarded(self, reason: Fallback, reqs: Sequence[Req] = ()) -> AbstractContextManager[None]: ...


class Feature:
    """One feature of one scheduler rank; every method does nothing by default."""

    fault: ClassVar[Fallback]
    """What an exception in `on_settled`, `on_released` or `make_room` is counted as."""

    # ---- A request ----

    def on_received(self, state: RequestState) -> None:
        """A request that may be spliced was received; the key of its rows is made next."""

    def diverts(self, state: RequestState) -> Fallback | None:
        """Why a request is served as if it had opted out; asked whenever it is matched, planned or counted."""
        return None

    def shape(self, state: RequestState, options: PlanOptions) -> PlanOptions:
        """What a plan of the request may take."""
        return options

    def on_admitted(self, req: Req) -> None:
        """A prefill chunk of the request, which may reuse, is in the next batch; it was counted."""

    def on_released(self, req: Req, tree: PicTree) -> None:
        """The request was served to its end: its rows are in the tree, locked by nobody."""

    # ---- Memory ----

    @property
    def num_slots(self) -> int:
        """Slots of the pool that are borrowed; SGLang counts them as evictable."""
        return 0

    def make_room(self, tree: PicTree) -> bool:
        """Give slots back, or locks on rows, because a request has too few; False if there is nothing to give."""
        return False

    # ---- The tree ----

    def on_settled(self, tree: PicTree) -> None:
        """The answers of a batch have left, and the index has their chunks."""

    def on_weights(self, tree: PicTree) -> None:
        """The weights changed, and the index was flushed; the tree may keep its rows as prefixes."""

    def on_index_lost(self) -> None:
        """A fault had the index flushed; the tree keeps its rows."""

    def on_flush(self) -> None:
        """The tree was emptied: locks on it are void."""

    # ---- What operators see ----

    def reports(self) -> dict[str, msgspec.Struct]:
        """Its parts of `/server_info`, by name."""
        return {}

    def summary(self) -> str:
        """What the log's line a minute says of it, since it was asked last; empty for nothing."""
        return ""


class Features:
    """The features of a server, in the order in which they are called."""

    def __init__(self, features: Sequence[Feature] = ()) -> None:
        self._features = [*features]

    def add(self, feature: Feature) -> None:
        """Call one more, after the others."""
        self._features.append(feature)

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._features)

    def find(self, kind: type[F]) -> F | None:
        """The feature of a kind, if the server has it."""
        return next((each for each in self._features if isinstance(each, kind)), None)

    def diversion(self, state: RequestState) -> Fallback | None:
        """The first reason why a request is served as if it had opted out."""
        return next((reason for each in self._features if (reason := each.diverts(state)) is not None), None)

    def shape(self, state: RequestState, options: PlanOptions) -> PlanOptions:
        """What a plan may take with all of them."""
        for each in self._features:
            options = each.shape(state, options)
        return options

    @property
    def num_slots(self) -> int:
        """Slots that they have borrowed."""
        return sum(each.num_slots for each in self._features)

    def reports(self) -> dict[str, msgspec.Struct]:
        """All parts of `/server_info`."""
        return {name: part for each in self._features for name, part in each.reports().items()}

    def summary(self) -> str:
        """What the log says of all of them."""
        return "; ".join(filter(None, (each.summary() for each in self._features)))
