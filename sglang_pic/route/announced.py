"""The names that listeners lack or have too many of: names of chunks with donors, against those announced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable

from sglang_pic.route.sketch import salted

Change = tuple[Hashable, int, int]
"""A namespace, the name of one of its chunks, and 1 for a new donor or -1 for one that went."""


class AnnouncedNames:
    """The names that listeners have, and those that changed since. Not thread-safe.

    Args:
        salt: the secret that servers and routers share.
        namespace_of: the canonical bytes of a namespace; None where its donors are not announced.
    """

    def __init__(self, salt: bytes, namespace_of: Callable[[Hashable], bytes | None]) -> None:
        self._salt, self._namespace_of = salt, namespace_of
        self.donors: Counter[int] = Counter()
        """Donors of each name, over all chunks and namespaces; shrinks with their donors."""
        # Names that listeners have, and those that may have changed since. Shrink likewise.
        self._announced: set[int] = set()
        self._changed: set[int] = set()

    def __len__(self) -> int:
        """Names that listeners have."""
        return len(self._announced)

    def apply(self, changes: Iterable[Change]) -> None:
        """Note changes, in their order."""
        by_kind: dict[tuple[Hashable, int], list[int]] = {}
        for namespace, name, change in changes:
            by_kind.setdefault((namespace, change), []).append(name)
        for (namespace, change), names in by_kind.items():
            key = self._namespace_of(namespace)
            for name in [] if key is None else salted(names, key, self._salt).tolist():
                self.donors[name] += change
                if not self.donors[name]:
                    del self.donors[name]
                self._changed.add(name)

    def lose_all(self) -> None:
        """There are no donors any more."""
        self._changed.update(self.donors)
        self.donors.clear()

    def begin(self) -> None:
        """Listeners know nothing."""
        self._announced.clear()
        self._changed = set(self.donors)

    def take(self, most: int) -> tuple[list[int], list[int]]:
        """Names to announce and names to withdraw, at most `most` together; they count as sent."""
        held: list[int] = []
        gone: list[int] = []
        while self._changed and len(held) + len(gone) < most:
            name = self._changed.pop()
            if (name in self.donors) is (name in self._announced):
                continue
            if name in self.donors:
                held.append(name)
                self._announced.add(name)
            else:
                gone.append(name)
                self._announced.discard(name)
        return held, gone
