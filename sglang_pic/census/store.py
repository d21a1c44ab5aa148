"""A store that the servers of a census share: keeps all that is written, and finds text through the real directory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Final

import numpy as np

from sglang_pic.core import Chunker, CoreConfig, Directory, PageHash, Span, Tokens

PAGE_SIZE: Final = 16
LEAST_LOADED: Final = 256
"""SGLang does not load less."""
LEAST_UNKNOWN: Final = 128
"""Shorter text is not looked up, as on a server."""


class Store:
    """Rows, by the hash of their page and all before it, and the directory of their text. Implements `Objects`.

    Args:
        config: how servers cut text.
        delimiters: ids of tokens that open or close a message.
    """

    def __init__(self, config: CoreConfig, delimiters: frozenset[int]) -> None:
        self._objects: dict[str, bytes] = {}
        self._pages: set[PageHash] = set()
        self._directory = Directory(
            self, fingerprint=b"", page_size=PAGE_SIZE, chunker=Chunker(config), delimiters=delimiters
        )

    def put(self, key: str, data: bytes) -> None:
        """Keep an object, unless the key has one."""
        self._objects.setdefault(key, data)

    def get(self, key: str, size: int) -> bytes | None:
        """The object of `size` bytes, or None."""
        data = self._objects.get(key)
        return data if data is not None and len(data) == size else None

    def has_rows(self, page: PageHash) -> bool:
        """Whether the rows of a page were written."""
        return page in self._pages

    def load_end(self, path: Tokens, start: int) -> int:
        """Up to where SGLang loads a path whose rows before `start` are there; `start` where it loads none."""
        first = start // PAGE_SIZE
        leading = takewhile(self.has_rows, _page_hashes(path)[first:])
        end = PAGE_SIZE * (first + sum(1 for _ in leading))
        return end if end - start >= LEAST_LOADED else start

    def write(self, path: Tokens, start: int) -> None:
        """Keep the rows of a path from `start` on, in whole pages."""
        self._pages.update(_page_hashes(path)[start // PAGE_SIZE :])

    def write_listed(self, path: Tokens, start: int) -> None:
        """Keep the rows of a path from `start` on, and list them in whole blocks."""
        start -= start % self._directory.block_tokens
        self.write(path, start)
        pages, first = _page_hashes(path), start // PAGE_SIZE
        before = pages[first - 1] if first else None
        # Nothing breaks here, so checksums need not tell rows apart.
        sums = np.zeros(len(pages) - first, dtype=np.uint64)
        self._directory.list_path(b"", path, start, before, pages[first:], sums)

    def find(self, tokens: Tokens, spans: Sequence[Span]) -> Iterator[Tokens]:
        """The paths that hold most of the spans of a prompt."""
        return (found.tokens for found in self._directory.find(b"", tokens, spans))


def _page_hashes(path: Tokens) -> list[PageHash]:
    hashes, page = [], b""
    for end in range(PAGE_SIZE, len(path) + 1, PAGE_SIZE):
        page = hashlib.sha256(page + path[end - PAGE_SIZE : end].tobytes()).digest()
        hashes.append(page)
    return hashes
