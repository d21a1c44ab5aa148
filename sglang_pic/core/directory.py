"""The directory of a shared store: finds the paths whose rows the store has by the text that they contain.

SGLang's store keys a page by the hash of all tokens up to its end, so only a reader who knows a whole path finds its
rows. The directory maps a piece of text to paths that contain it, with two kinds of small objects beside the rows:

    anchor   for every `ANCHOR_EVERY`th chunk, chosen by its hash: the block that contains it, and its position
    block    for `block_tokens` tokens of a path: the block before it, its tokens, checksums of its rows

Where the hash of a page depends on the token behind it, too (`lookahead`), a block has that token.

A reader cuts unknown text as the writer did, loads the anchors of its chunks, and walks from a block to the root of its
path. It compares token ids, and refuses rows with another checksum.

Objects are never changed or deleted; a store may evict any of them. Different content for a key is written to the next
of its `SLOTS` places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from sglang_pic.core.chunker import Chunker
from sglang_pic.core.spans import Span, merge_spans
from sglang_pic.core.token_loops import ENDING_LEN
from sglang_pic.core.tokens import TOKEN_BYTES, Tokens, common_len, common_suffix_len

ANCHOR_EVERY: Final = 4
"""One chunk in so many is an anchor: one in 64 tokens with chunks of 16. 99 % of texts of 256 tokens have one."""

LEAST_UNKNOWN: Final = 128
"""Shorter text is not looked up."""

SLOTS: Final = 4
"""Objects that one key may have."""

_LEAST_BLOCK = 64
_MAGIC = b"PIC1"
_HASH_BYTES = 32
_SUM_BYTES = 8
_ROOT = bytes(_HASH_BYTES)
_FRAME_BYTES = len(_MAGIC) + _SUM_BYTES
# A chain that is longer than any context is broken.
_MAX_BLOCKS = 1 << 16

PageHash = bytes
"""SGLang's hash of a page and all before it: 32 bytes."""
Sums = npt.NDArray[np.uint64]
"""The xxh3-64 of each page's rows: `[num_pages]`."""


class Objects(Protocol):
    """A store; each call may raise."""

    def put(self, key: str, data: bytes) -> None:
        """Store an object, unless the key has one."""

    def get(self, key: str, size: int) -> bytes | None:
        """The object of `size` bytes, or None."""

    def has_rows(self, page: PageHash) -> bool:
        """Whether the store has the rows of a page."""


class Found(NamedTuple):
    """A path whose rows the store has."""

    tokens: Tokens
    """The path, in whole blocks, and `lookahead` tokens more."""
    sums: Sums
    """Checksums that its pages' rows may have: `[num_objects, num_pages]`."""
    num_equal: int
    """Tokens of the prompt's unknown spans that the path contains."""


class _Block(NamedTuple):
    parent: PageHash
    """The last page before it."""
    tokens: Tokens
    """Its own, and `lookahead` more."""
    sums: list[Sums]
    """The checksums in each of the block's objects."""


class Directory:
    """Lists and finds the paths of servers with one fingerprint. Thread-safe: it has no state.

    Args:
        objects: the store.
        fingerprint: digest of everything beside the tokens that rows depend on (model, dtype, ...).
        page_size: tokens of a page.
        chunker: cuts text as every server with this fingerprint does.
        delimiters: ids of tokens that open or close a message.
        lookahead: tokens behind a page that its hash depends on.
    """

    def __init__(
        self,
        objects: Objects,
        *,
        fingerprint: bytes,
        page_size: int,
        chunker: Chunker,
        delimiters: frozenset[int] = frozenset(),
        lookahead: int = 0,
    ) -> None:
        self._objects, self._chunker, self._delimiters = objects, chunker, delimiters
        self.fingerprint = fingerprint
        self.block_tokens = -(-_LEAST_BLOCK // page_size) * page_size
        """Tokens of a block: 64, in whole pages."""
        self._pages, self._lookahead = self.block_tokens // page_size, lookahead

    def list_path(
        self,
        namespace: bytes,
        tokens: Tokens,
        start: int,
        before: PageHash | None,
        pages: Sequence[PageHash],
        sums: Sums,
    ) -> None:
        """List the pages of a path that were written to the store.

        Args:
            namespace: only requests of this namespace find the path.
            tokens: the path from its root, and `lookahead` tokens behind the last page.
            start: the first position to list, the end of a block.
            before: the page that ends there, or None at the root.
            pages: the pages from `start` on; those after the last whole block are not listed.
            sums: their rows' checksums.

        Raises:
            Exception: the store failed.
        """
        parent, blocks = before or _ROOT, pages[self._pages - 1 :: self._pages]
        for number, block in enumerate(blocks):
            at, first = start + number * self.block_tokens, number * self._pages
            rows = sums[first : first + self._pages]
            content = parent + tokens[at : at + self._block_len].tobytes() + rows.tobytes()
            self._put_new("block", block, content)
            parent = block
        stop = start + len(blocks) * self.block_tokens
        for name, end in self._anchors(namespace, tokens, start, stop):
            # The next block: the text that follows the anchor is likely to be equal, too.
            block = blocks[min((end - 1 - start) // self.block_tokens + 1, len(blocks) - 1)]
            # One path with rows is enough.
            if not any(self._objects.has_rows(listed) for listed, _ in self._listed(name)):
                self._put_new("anchor", name, block + end.to_bytes(_SUM_BYTES, "little"))

    def find(self, namespace: bytes, tokens: Tokens, spans: Sequence[Span], *, max_paths: int = 4) -> list[Found]:
        """The `max_paths` paths that contain most tokens of `spans` of a prompt, best first.

        A common prefix of path and prompt does not count: SGLang's store finds it.

        Raises:
            Exception: the store failed.
        """
        anchors = [anchor for start, end in spans for anchor in self._anchors(namespace, tokens, start, end)]
        hits = [(end, *listed) for name, end in anchors for listed in self._listed(name)]
        found: list[Found] = []
        passed: set[PageHash] = set()
        # A later anchor leads to a longer path, which may contain earlier ones.
        for _, last, _ in reversed(hits):
            if last in passed:
                continue
            passed.add(last)
            blocks = self._walk(last) if self._objects.has_rows(last) else None
            if blocks is None:
                continue
            on_path = {last, *(block.parent for block in blocks)}
            passed |= on_path
            whole = [block.tokens[: self.block_tokens] for block in blocks]
            path = np.concatenate([*whole, blocks[-1].tokens[self.block_tokens :]])
            equal = [_equal(tokens, path, end, place) for end, block, place in hits if block in on_path]
            num_equal = sum(end - start for start, end in merge_spans(equal))
            if num_equal:
                found.append(Found(path, _side_by_side([block.sums for block in blocks]), num_equal))
        return sorted(found, key=lambda each: -each.num_equal)[:max_paths]

    def _anchors(self, namespace: bytes, tokens: Tokens, start: int, end: int) -> Iterator[tuple[bytes, int]]:
        """The key of each anchor that ends in `(start, end)`, and where it ends."""
        data = tokens.data.cast("B")
        begin = self._chunker.sync_start(tokens, start, self._delimiters)
        for stop in self._chunker.cut(tokens, begin, end, delimiters=self._delimiters):
            # The last cut is the end of the text, not of a chunk.
            is_whole = start < stop < end and stop - begin >= ENDING_LEN
            if is_whole and self._chunker.name(data, begin, stop) % ANCHOR_EVERY == 0:
                digest = hashlib.blake2b(namespace, digest_size=16, key=self.fingerprint)
                digest.update(data[TOKEN_BYTES * begin : TOKEN_BYTES * stop])
                yield digest.digest(), stop
            begin = stop

    def _walk(self, last: PageHash) -> list[_Block] | None:
        """The blocks from the root to the one that ends with `last`; None where one is missing."""
        blocks: list[_Block] = []
        while last != _ROOT:
            # Objects of one page have the same tokens; they differ in the rows' checksums.
            contents = [*self._contents("block", last)]
            if not contents or len(blocks) > _MAX_BLOCKS:
                return None
            sums = [np.frombuffer(content, dtype=np.uint64, offset=self._sums_at) for content in contents]
            tokens = np.frombuffer(contents[0], dtype=np.int32, count=self._block_len, offset=_HASH_BYTES)
            last = contents[0][:_HASH_BYTES]
            blocks.append(_Block(last, tokens, sums))
        return blocks[::-1] or None

    def _listed(self, anchor: bytes) -> Iterator[tuple[PageHash, int]]:
        """The blocks that contain an anchor, and its end on their paths."""
        for content in self._contents("anchor", anchor):
            yield content[:_HASH_BYTES], int.from_bytes(content[_HASH_BYTES:], "little")

    def _contents(self, kind: str, name: bytes) -> Iterator[bytes]:
        """The intact objects of a key."""
        for key, data in self._slots(kind, name):
            content = b"" if data is None else data[len(_MAGIC) : -_SUM_BYTES]
            if data == _frame(key, content):
                yield content

    def _put_new(self, kind: str, name: bytes, content: bytes) -> None:
        """Write `content` to the first free slot, unless a slot has it or none is free."""
        for key, data in self._slots(kind, name):
            if data is None:
                self._objects.put(key, _frame(key, content))
            elif data == _frame(key, content):
                return

    def _slots(self, kind: str, name: bytes) -> Iterator[tuple[str, bytes | None]]:
        """The keys of a name's slots, each with its object, up to the first free one, which has None."""
        content_bytes = _HASH_BYTES + _SUM_BYTES
        if kind == "block":
            content_bytes = self._sums_at + _SUM_BYTES * self._pages
        digest = hashlib.blake2b(name, digest_size=16, key=self.fingerprint, person=kind.encode()).hexdigest()
        for slot in range(SLOTS):
            key = f"pic-{kind}-{digest}-{slot}"
            data = self._objects.get(key, content_bytes + _FRAME_BYTES)
            yield key, data
            if data is None:
                return

    @property
    def _block_len(self) -> int:
        return self.block_tokens + self._lookahead

    @property
    def _sums_at(self) -> int:
        return _HASH_BYTES + TOKEN_BYTES * self._block_len


def _equal(tokens: Tokens, path: Tokens, end: int, place: int) -> Span:
    """The span of a prompt around an anchor's end that equals the path around `place`; empty if it is the prefix."""
    if not 0 < place <= len(path) or common_len(tokens, path) >= end:
        return end, end
    before = common_suffix_len(tokens[:end], path[:place])
    return (end - before, end + common_len(tokens[end:], path[place:])) if before else (end, end)


def _side_by_side(blocks: list[list[Sums]]) -> Sums:
    """The checksums of all blocks' pages, `[num_objects, num_pages]`; those of a block with fewer objects are
    repeated."""
    most = max(map(len, blocks))
    return np.concatenate([np.stack([sums[at % len(sums)] for at in range(most)]) for sums in blocks], axis=1)


def _frame(key: str, content: bytes) -> bytes:
    """The bytes of an object, with a checksum: broken bytes, or those of another version or key, do not equal it."""
    return _MAGIC + content + xxhash.xxh3_64_digest(key.encode() + content)
