"""The directory of a store: text is found wherever it stands, and nothing that a store says is believed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
from core_builders import text

from sglang_pic.core import Chunker, CoreConfig, Directory, Found, PageHash, Sums, Tokens

NAMESPACE = b"ours"


class Store:
    """Objects in memory, and the pages whose rows are there."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.rows: set[PageHash] = set()

    def put(self, key: str, data: bytes) -> None:
        self.objects.setdefault(key, data)

    def get(self, key: str, size: int) -> bytes | None:
        return self.objects.get(key, b"")[:size] or None

    def has_rows(self, page: PageHash) -> bool:
        return page in self.rows


def directory(store: Store, *, fingerprint: bytes = b"model", page_size: int = 16) -> Directory:
    return Directory(store, fingerprint=fingerprint, page_size=page_size, chunker=Chunker(CoreConfig()))


def hashes(tokens: Tokens, page_size: int) -> list[PageHash]:
    """Of every page with all before it, as SGLang makes them."""
    ends = range(page_size, len(tokens) + 1, page_size)
    return [hashlib.sha256(tokens[:end].tobytes()).digest() for end in ends]


def write(store: Store, tokens: Tokens, start: int = 0, *, page_size: int = 16, salt: int = 0) -> None:
    """A server wrote the rows of a path from `start` on, and lists them; `salt` tells one server's rows from others."""
    lister, pages = directory(store, page_size=page_size), hashes(tokens, page_size)
    store.rows.update(pages)
    start -= start % lister.block_tokens
    first = start // page_size
    before = pages[first - 1] if first else None
    lister.list_path(NAMESPACE, tokens, start, before, pages[first:], sums(pages[first:], salt))


def sums(pages: Sequence[PageHash], salt: int = 0) -> Sums:
    return np.array([(int.from_bytes(page[:8], "little") + salt) % 2**64 for page in pages], dtype=np.uint64)


def find(store: Store, tokens: Tokens, *, page_size: int = 16, **other: bytes) -> list[Found]:
    namespace = other.pop("namespace", NAMESPACE)
    return directory(store, page_size=page_size, **other).find(namespace, tokens, [(0, len(tokens))])


TEXT = text(1, 1000)
MOVED = np.concatenate([text(2, 333), TEXT, text(3, 50)])


@pytest.mark.parametrize("page_size", [1, 16, 24, 64, 128])
def test_moved_text_is_found_with_its_path_and_the_sums_of_its_rows(page_size: int) -> None:
    store = Store()
    path = np.concatenate([text(4, 200), TEXT])
    write(store, path, page_size=page_size)
    (found,) = find(store, MOVED, page_size=page_size)
    assert len(found.tokens) % directory(store, page_size=page_size).block_tokens == 0
    assert (found.tokens == path[: len(found.tokens)]).all()
    assert 850 <= found.num_equal <= len(found.tokens) - 200
    assert (found.sums == sums(hashes(found.tokens, page_size))).all()


def test_paths_that_grow_and_part_are_found_as_far_as_they_were_listed() -> None:
    """Turns are listed as they come; paths part in the middle of what was listed, and share blocks and anchors."""
    store, first = Store(), text(5, 700)
    write(store, first)
    write(store, np.concatenate([first, TEXT]), 700)
    write(store, np.concatenate([first[:333], text(6, 400), TEXT[:500]]), 333)
    (found,) = find(store, MOVED)
    assert (found.tokens[:700] == first).all()
    assert found.num_equal > 850
    both = find(store, np.concatenate([text(7, 40), text(6, 400), text(8, 40), TEXT]))
    assert [each.num_equal > least for each, least in zip(both, (850, 300), strict=True)] == [True, True]


def test_nobody_finds_it_in_another_namespace_or_with_another_model() -> None:
    store = Store()
    write(store, TEXT)
    assert find(store, MOVED)
    assert not find(store, MOVED, namespace=b"theirs")
    assert not find(store, MOVED, fingerprint=b"other weights")
    assert not find(store, text(9, 2000))


def test_what_begins_as_the_prompt_does_is_left_to_the_store_itself() -> None:
    store = Store()
    write(store, TEXT)
    assert not find(store, np.concatenate([TEXT, text(2, 100)]))


def test_nothing_that_is_broken_is_believed() -> None:
    """Each object in turn is cut, changed in one bit, or that of another key: what is found is true, or nothing."""
    store = Store()
    write(store, TEXT)
    pages = sums(hashes(TEXT, 16))
    whole = dict(store.objects)
    keys, num_nothing = [*whole], 0
    for number, key in enumerate(keys):
        for broken in (
            whole[key][:-1],
            bytes([*whole[key][:60], whole[key][60] ^ 1, *whole[key][61:]]) if len(whole[key]) > 60 else b"x",
            whole[keys[number - 1]],
        ):
            store.objects = {**whole, key: broken}
            found = find(store, MOVED)
            num_nothing += not found
            for each in found:
                assert set(each.sums.ravel().tolist()) <= set(pages.tolist())
                assert each.num_equal <= len(TEXT)
    assert num_nothing


def test_rows_that_left_the_store_are_listed_again_elsewhere() -> None:
    store = Store()
    write(store, TEXT)
    store.rows.clear()
    assert not find(store, MOVED)
    write(store, np.concatenate([text(4, 64), TEXT]))
    (found,) = find(store, MOVED)
    assert (found.tokens[:64] == text(4, 64)).all()


def test_rows_that_were_computed_again_may_be_either() -> None:
    """Servers differ in the last bits, and a store keeps whose came first: which, the directory cannot know."""
    store = Store()
    for salt in (0, 7, 7):
        write(store, TEXT, salt=salt)
    (found,) = find(store, MOVED)
    pages = hashes(found.tokens, 16)
    assert found.sums.tolist() == [sums(pages).tolist(), sums(pages, 7).tolist()]
