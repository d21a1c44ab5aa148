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
        self._own: set[PageHash] = set()
        """Pages of rows that are spliced, or stand behind spliced ones."""
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
        """Up to where stock SGLang loads a path whose rows before `start` are there; `start` where it loads none."""
        return self._load(path, start, self._pages)[0]

    def load_exact(self, path: Tokens, start: int) -> int:
        """The same of exact rows alone, as for text that the directory found."""
        return self.load_end(path, start)

    def load_prefix(self, path: Tokens, start: int) -> Span:
        """The same of exact rows and rows with keys of our own, and up to where they are exact."""
        return self._load(path, start, self._pages | self._own)

    def write(self, path: Tokens, start: int, end: int | None = None) -> None:
        """Keep the rows of `[start, end)` of a path, in whole pages."""
        self._pages.update(_page_hashes(path[:end])[start // PAGE_SIZE :])

    def write_listed(self, path: Tokens, start: int, exact_end: int) -> None:
        """Keep the rows of a path from `start` on: up to `exact_end` listed in whole blocks, then with own keys."""
        PLACEHOLDER

    def find(self, tokens: Tokens, spans: Sequence[Span]) -> Iterator[Tokens]:
        """The paths that hold most of the spans of a prompt."""
        return (found.tokens for found in self._directory.find(b"", tokens, spans))


def _page_hashes(path: Tokens) -> list[PageHash]:
    hashes, page = [], b""
    for end in range(PAGE_SIZE, len(path) + 1, PAGE_SIZE):
        page = hashlib.sha256(page + path[end - PAGE_SIZE : end].tobytes()).digest()
        hashes.append(page)
    return hashes
