"""What must hold of a chunk index between any two calls, checked in full.

Owns no state. Reads the index's private parts, which is why it lives beside it. Cost O(index): for tests, and for the
switch that checks a live server.
"""

from __future__ import annotations

from sglang_pic.core.donors import NONE, DonorTable, Heads
from sglang_pic.core.index import ContentIndex
from sglang_pic.core.trie import Segment, Trie, merge_spans

__all__ = ["check"]


def check(index: ContentIndex) -> None:
    """Check everything.

    Raises:
        AssertionError: something is broken; the message says what and where.
    """
    segments: list[Segment] = []
    for namespace, space in index._namespaces.items():
        assert space.trie.namespace == namespace, f"{namespace!r}: its trie belongs to {space.trie.namespace!r}"
        assert space.trie.root.children, f"{namespace!r}: an empty namespace was kept"
        segments += _check_trie(space.trie)
        _check_heads(index._donors, space.heads, space.trie, index.config.max_donors_per_chunk)
    _check_ages(index, segments)
    _check_table(index._donors, segments)
    num_tokens = sum(len(segment.tokens) for segment in segments)
    assert num_tokens == index._num_tokens, f"{num_tokens} tokens are stored, {index._num_tokens} are counted"
    bound = index.config.max_index_tokens
    assert num_tokens <= bound, f"{num_tokens} tokens are stored, {bound} are allowed"


def _check_trie(trie: Trie) -> list[Segment]:
    """The segments of a trie, each one checked against its parent."""
    assert trie.root.start == 0, "a root begins at position 0"
    assert not len(trie.root.tokens), "a root has no tokens"
    assert not trie.root.donors, "a root has no donors"
    found = list(trie.root.children.values())
    for node in found:
        where = f"{trie.namespace!r}, segment {node.serial} [{node.start}, {node.end})"
        parent = node.parent
        assert node.trie is trie, f"{where}: belongs to another trie"
        assert len(node.tokens), f"{where}: empty"
        assert parent is not None, f"{where}: in the trie, but marked as removed"
        assert parent.end == node.start, f"{where}: its parent ends at {parent.end}"
        assert parent.children.get(int(node.tokens[0])) is node, f"{where}: not under its first token"
        assert node.eligible == merge_spans(node.eligible), f"{where}: eligible spans not in order: {node.eligible}"
        for start, end in node.eligible:
            assert node.start <= start < end <= node.end, f"{where}: eligible span [{start}, {end}) leaves it"
        found.extend(node.children.values())
    return found


def _check_ages(index: ContentIndex, segments: list[Segment]) -> None:
    ages = {serial: age for age, serial in enumerate(index._ages)}
    assert len(ages) == len(segments), f"{len(segments)} segments are stored, {len(ages)} have an age"
    for segment in segments:
        assert index._ages.get(segment.serial) is segment, f"segment {segment.serial} has no age"
        for child in segment.children.values():
            assert ages[child.serial] < ages[segment.serial], (
                f"segment {segment.serial} is older than its child {child.serial}: it would be evicted first"
            )


def _check_heads(table: DonorTable, heads: Heads, trie: Trie, max_per_key: int) -> None:
    for key in heads:
        donors = table.of(heads, key)
        assert 1 <= len(donors) <= max_per_key, f"key {key:x}: {len(donors)} donors, {max_per_key} are allowed"
        assert len(set(donors)) == len(donors), f"key {key:x}: a donor is listed twice"
        for donor in donors:
            segment = table.segments[donor]
            assert segment is not None, f"donor {donor}: listed, but removed"
            assert segment.trie is trie, f"donor {donor}: lies in namespace {segment.trie.namespace!r}"
            assert table.key(donor) == key, f"donor {donor}: listed under another key"


def _check_table(table: DonorTable, segments: list[Segment]) -> None:
    num_held = 0
    for segment in segments:
        num_held += len(segment.donors)
        for donor in segment.donors:
            start, end = table.starts[donor], table.end(donor)
            where = f"donor {donor} [{start}, {end}) of segment {segment.serial} [{segment.start}, {segment.end})"
            assert table.segments[donor] is segment, f"{where}: points elsewhere"
            assert 0 <= start < end, f"{where}: empty"
            assert segment.start < end <= segment.end, f"{where}: its last token lies elsewhere"
            assert segment.eligible_around(end - 1) is not None, f"{where}: its last token is not eligible"
    assert num_held == len(table), f"{len(table)} donors are counted, segments hold {num_held}"
    num_listed = sum(1 for segment in table.segments if segment is not None)
    assert num_listed == len(table), f"{len(table)} donors are counted, {num_listed} have a segment"
    assert NONE == -1, "NONE marks the end of a list"
