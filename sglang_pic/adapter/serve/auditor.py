"""What the serving path asks of the live audit."""

from __future__ import annotations

from typing import NamedTuple

from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.seams import Req
from sglang_pic.adapter.serve.state import RequestState


class Drift(NamedTuple):
    """What audits found so far."""

    num_audited: int
    """Requests that were audited, of all time."""
    kl: float
    """The largest mean of a namespace's window in nats; 0 until a namespace has `audit_min` requests."""
    limit: float
    """Above that, a namespace is switched off."""


class Auditor:
    """Says which requests may be spliced; these are the answers of a server without audits."""

    @property
    def num_slots(self) -> int:
        """Slots of the pool that are borrowed for passes of the audit; SGLang may have them back at any time."""
        return 0

    def release_slots(self) -> int:
        """Give the borrowed slots back to the allocator; how many there were."""
        return 0

    def is_on(self, namespace: Namespace) -> bool:
        """Whether requests of the namespace may be spliced."""
        return True

    def generation(self, namespace: Namespace) -> int:
        """How often the namespace was switched off, and on again."""
        return 0

    def serves(self, state: RequestState) -> bool:
        """Whether a request that was received earlier may still be spliced, and be served rows that were."""
        return True

    def drift(self) -> Drift | None:
        """What audits found, `None` where there are none."""
        return None

    def draw(self, req: Req) -> None:
        """Consider an admitted request for an audit."""

    def flush(self) -> None:
        """Begin anew, because the tree was emptied."""
