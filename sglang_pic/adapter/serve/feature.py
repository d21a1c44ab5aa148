"""Features: additions to the way of a request, each in a module of its own.

A feature overrides the methods that it needs. The stations call them through `Features`, in the order of the list, on
every rank alike, and know no feature by name. They turn exceptions into faults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol, TypeVar

import msgspec

from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.state import RequestState
from sglang_pic.adapter.sglang.seams import Req, RunnerOutput, ScheduleBatch, Tree

F = TypeVar("F", bound="Feature")


class PicTree(Tree, Protocol):
    """`serve/tree.py`'s, as features see it."""

    def is_outdated(self, req: Req) -> bool: ...


class Feature:
    """One feature of one scheduler rank; every method does nothing by default."""

    fault: ClassVar[Fallback]
    """The reason that counts exceptions in `on_released`, `on_weights` and `make_room`."""

    # ---- A request ----

    def on_received(self, state: RequestState) -> None:
        """A request that may be spliced was received; the key of its rows is made afterwards.

        A feature that pins rows sets `state.pinned_len`.
        """

    def diverts(self, state: RequestState) -> Fallback | None:
        """Why the request is served as if it had opted out, or None; called when it is matched, planned and counted."""
        return None

    def on_admitted(self, req: Req) -> None:
        """A prefill chunk of the request was admitted and counted; called only if the request may reuse."""

    def watch(self, batch: ScheduleBatch) -> Callable[[RunnerOutput], None] | None:
        """A batch is about to be prefilled, with or without splices; returns a callback for the pass's output, or None.

        The callback runs once, on the forward stream, before anything is sampled from the output.
        """
        return None

    def on_released(self, req: Req, tree: PicTree) -> None:
        """The request finished: its rows are in the tree, unlocked."""

    # ---- Memory ----

    @property
    def num_slots(self) -> int:
        """Slots borrowed from the pool; SGLang counts them as evictable."""
        return 0

    def make_room(self, tree: PicTree) -> bool:
        """Return slots or release locks because a request lacks slots; False if there are none."""
        return False

    # ---- The tree ----

    def on_weights(self, tree: PicTree) -> None:
        """The weights changed, and the index was flushed; the tree may keep its rows as prefixes."""

    def on_index_lost(self) -> None:
        """A fault emptied the index; the tree keeps its rows."""

    def on_flush(self) -> None:
        """The tree was emptied: locks on it are void."""

    # ---- What operators see ----

    def reports(self) -> dict[str, msgspec.Struct]:
        """This feature's parts of `/server_info`, by name."""
        return {}

    def summary(self) -> str:
        """This feature's part of the log's line a minute, since the last call; may be empty."""
        return ""


class Features(list[Feature]):
    """The features of a server, in the order in which they are called."""

    def find(self, kind: type[F]) -> F | None:
        """The feature of a class, if the server has it."""
        return next((each for each in self if isinstance(each, kind)), None)

    def diversion(self, state: RequestState) -> Fallback | None:
        """The first reason why a request is served as if it had opted out, or None."""
        return next((reason for each in self if (reason := each.diverts(state)) is not None), None)

    @property
    def num_slots(self) -> int:
        """Slots borrowed by all features."""
        return sum(each.num_slots for each in self)

    def reports(self) -> dict[str, msgspec.Struct]:
        """All features' parts of `/server_info`."""
        return {name: part for each in self for name, part in each.reports().items()}

    def summary(self) -> str:
        """All features' parts of the log's line."""
        return "; ".join(filter(None, (each.summary() for each in self)))
