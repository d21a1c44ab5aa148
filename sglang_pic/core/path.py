"""Token paths under which the radix tree has a donor's rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from sglang_pic.core import budget
from sglang_pic.core.tokens import Tokens, common_len
from sglang_pic.core.trie import Node


class Path:
    """A token path from position 0 on which a donor's rows are; immutable. It may be longer than the donor needs.

    Within one plan equal paths are one object that all runs on it share, so a source of rows may keep locks by path.
    """

    __slots__ = ("_end", "_hash", "_joined", "_parts", "namespace")

    def __init__(self, namespace: Hashable, parts: Sequence[Tokens]) -> None:
        self.namespace = namespace
        self._parts = tuple(parts)
        self._end = sum(map(len, parts))
        # Looked up several times for each run.
        self._hash = hash((namespace, self._end, int(parts[-1][-1])))
        # Only as many leading parts as were asked for: the path may be much longer.
        self._joined = self._parts[0]
        self._joined.flags.writeable = False

    def __len__(self) -> int:
        return self._end

    def tokens(self, end: int | None = None) -> Tokens:
        """The first `end` tokens, or all; a read-only view. Cost O(end) in all, then O(1)."""
        wanted = len(self) if end is None else min(end, len(self))
        if wanted > len(self._joined):
            self._joined = self._join(max(wanted, 2 * len(self._joined)))
        return self._joined[:wanted]

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Path):
            return self is other
        same_kind = self.namespace == other.namespace and len(self) == len(other)
        return same_kind and np.array_equal(self.tokens(), other.tokens())

    def __hash__(self) -> int:
        return self._hash

    def _join(self, wanted: int) -> Tokens:
        num_parts = length = 0
        while length < min(wanted, self._end):
            length += len(self._parts[num_parts])
            num_parts += 1
        joined = np.concatenate(self._parts[:num_parts])
        joined.flags.writeable = False
        return joined


class PlanPaths:
    """The paths of one plan; nodes on one path share it, so that a conversation is joined and resolved once.

    Args:
        tokens: the prompt.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._by_serial: dict[int, Path] = {}
        # How many leading tokens a path shares with the prompt; the same donor may serve thousands of runs.
        self._equal_lens: dict[Path, int] = {}
        self.work = 0
        """Cost so far, in tokens compared."""

    def through(self, node: Node) -> Path:
        """A path through `node` and on along the newest children.

        In a tree of pages the last token of a node is resident only together with the rest of its page.
        """
        path = self._by_serial.get(node.serial)
        if path is None:
            leaf = node
            while leaf.children:
                leaf = leaf.children[next(reversed(leaf.children))]
            line = leaf.lineage()
            path = Path(node.trie.namespace, [part.tokens for part in line])
            for part in line:
                self._by_serial.setdefault(part.serial, path)
            self.work += budget.PER_NODE * len(line) + node.end // budget.COPIED_TOKENS
        return path

    def is_exact(self, start: int, shift: int, path: Path) -> bool:
        """Whether the rows from `start` on were computed after exactly the tokens before `start` in the prompt."""
        if shift != 0:
            return False
        if path not in self._equal_lens:
            self._equal_lens[path] = common_len(path.tokens(len(self._tokens)), self._tokens)
        return start <= self._equal_lens[path]
