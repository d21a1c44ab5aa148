"""A store that the servers of a census share: keeps all that is written, and finds text through the real directory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Final

import numpy as np
from pic_traces.encode.encoded import Encoder

from sglang_pic.census.simulate import NAMESPACE, Cache
from sglang_pic.core import LEAST_UNKNOWN, Chunker, CoreConfig, Directory, PageHash, Span, Tokens, rows_from_store

PAGE_SIZE: Final = 16
LEAST_LOADED: Final = 256
"""SGLang does not load less."""


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

    def load_end(self, path: Tokens, start: int) -> tuple[int, int]:
        """Up to where a server loads a path whose rows before `start` are there, and up to where these are exact.

        Both are `start` where it loads none.
        """
        first = start // PAGE_SIZE
        pages = _page_hashes(path)[first:]
        num_exact = sum(1 for _ in takewhile(self.has_rows, pages))
        num_found = sum(1 for _ in takewhile(lambda page: page in self._pages or page in self._own, pages))
        end = PAGE_SIZE * (first + num_found)
        return (end, max(start, PAGE_SIZE * (first + num_exact))) if end - start >= LEAST_LOADED else (start, start)

    def write(self, path: Tokens, start: int) -> None:
        """Keep the rows of a path from `start` on, in whole pages."""
        self._pages.update(_page_hashes(path)[start // PAGE_SIZE :])

    def write_listed(self, path: Tokens, start: int, exact_end: int) -> None:
        """Keep the rows of a path from `start` on; list those before `exact_end`, in whole blocks."""
        pages, num_exact = _page_hashes(path), max(start, exact_end) // PAGE_SIZE
        self._own.update(pages[num_exact:])
        if exact_end <= start:
            return
        start -= start % self._directory.block_tokens
        first = start // PAGE_SIZE
        exact = pages[first:num_exact]
        self._pages.update(exact)
        before = pages[first - 1] if first else None
        # Nothing breaks here, so checksums need not tell rows apart.
        sums = np.zeros(len(exact), dtype=np.uint64)
        self._directory.list_path(b"", path[:exact_end], start, before, exact, sums)

    def find(self, tokens: Tokens, spans: Sequence[Span]) -> Iterator[Tokens]:
        """The paths that hold most of the spans of a prompt."""
        return (found.tokens for found in self._directory.find(b"", tokens, spans))


class StoreCache(Cache):
    """A server's cache beside a store that other servers read and write, too."""

    def __init__(self, config: CoreConfig, encoder: Encoder, pool_tokens: int, store: Store) -> None:
        super().__init__(config, encoder, pool_tokens)
        self._store = store
        self.num_loaded = 0
        """Tokens whose rows came from the store."""

    def load(self, tokens: Tokens, call: int) -> None:
        """Load what the store has of a prompt's prefix, then the paths that hold text that no donor here has."""
        start = self.prefixes.resident_len(tokens)
        spans = self.index.unknown(NAMESPACE, tokens, start, LEAST_UNKNOWN)
        for path in (tokens, *self._store.find(tokens, spans)):
            start = self.prefixes.resident_len(path)
            end, exact_end = self._store.load_end(path, start)
            if end > start:
                self.prefixes.insert(path[:end], call)
                rows = rows_from_store(start, end, exact_end, self.index.config.max_generation)
                self.index.note(NAMESPACE, path[:end], rows, self.encoder.delimiters)
                self.num_loaded += end - start

    def write(self, path: Tokens, start: int) -> None:
        """List the exact rows; as on the server, a node is written whole or not at all."""
        exact_end = self.index.exactness(NAMESPACE, path).exact_len
        if exact_end == len(path) or self.index.generation(NAMESPACE, path) <= self.index.config.max_generation:
            self._store.write_listed(path, start, exact_end)


def _page_hashes(path: Tokens) -> list[PageHash]:
    hashes, page = [], b""
    for end in range(PAGE_SIZE, len(path) + 1, PAGE_SIZE):
        page = hashlib.sha256(page + path[end - PAGE_SIZE : end].tobytes()).digest()
        hashes.append(page)
    return hashes
