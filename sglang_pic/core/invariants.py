"""What must hold of a chunk index between any two calls, checked in full.

Owns no state. Reads the index's private parts, which is why it lives beside it. Cost O(index): for tests, and for the
switch that checks a live server.
"""

from __future__ import annotations

import numpy as np

from sglang_pic.core.chunker import Tokens
from sglang_pic.core.donors import NONE, DonorTable
from sglang_pic.core.ending_filter import TAIL_LEN, tail_hashes
from sglang_pic.core.index import ContentIndex
from sglang_pic.core.spans import merge_spans
from sglang_pic.core.trie import Segment, Trie

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
        found = _check_trie(space.trie)
        _check_lists(space.donors, space.trie, index.config.max_donors_per_chunk)
        _check_donors(space.donors, found)
        segments += found
    _check_ages(index, segments)
    _check_sizes(index, segments)


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


def _check_lists(table: DonorTable, trie: Trie, max_per_name: int) -> None:
    num_listed = 0
    for tail in table.heads:
        donors = table.of(tail)
        num_listed += len(donors)
        assert len(set(donors)) == len(donors), f"tail {tail:x}: a donor is listed twice"
        assert table.passes_filter(tail), f"tail {tail:x}: the filter does not let it pass"
        names = [table.names[donor] for donor in donors]
        for donor in donors:
            segment = table.segments[donor]
            assert segment is not None, f"donor {donor}: listed, but removed"
            assert segment.trie is trie, f"donor {donor}: lies in namespace {segment.trie.namespace!r}"
            assert table.tails[donor] == tail, f"donor {donor}: listed under another tail"
            times = names.count(table.names[donor])
            assert times <= max_per_name, f"donor {donor}: {times} of its name, {max_per_name} are allowed"
    assert num_listed == len(table), f"{len(table)} donors are counted, {num_listed} are listed"


def _check_donors(table: DonorTable, segments: list[Segment]) -> None:
    num_held = 0
    for segment in segments:
        num_held += len(segment.donors)
        for donor in segment.donors:
            start, end = table.starts[donor], table.end(donor)
            where = f"donor {donor} [{start}, {end}) of segment {segment.serial} [{segment.start}, {segment.end})"
            assert table.segments[donor] is segment, f"{where}: points elsewhere"
            assert 0 <= start <= end - TAIL_LEN, f"{where}: shorter than a tail"
            assert segment.start < end <= segment.end, f"{where}: its last token lies elsewhere"
            assert segment.eligible_around(end - 1) is not None, f"{where}: its last token is not eligible"
            chunk = _tokens_before(segment, end, table.lengths[donor])
            assert int(tail_hashes(chunk[-TAIL_LEN:])[0]) == table.tails[donor], f"{where}: its tail hash is another"
            assert table.is_named(donor, chunk), f"{where}: its name is another"
    assert num_held == len(table), f"{len(table)} donors are counted, segments hold {num_held}"
    num_pointing = sum(1 for segment in table.segments if segment is not None)
    assert num_pointing == len(table), f"{len(table)} donors are counted, {num_pointing} have a segment"
    assert NONE == -1, "NONE marks the end of a list"


def _tokens_before(segment: Segment, end: int, length: int) -> Tokens:
    """The `length` tokens before position `end` of the path to `segment`."""
    parts: list[Tokens] = []
    node, at = segment, end
    while at > end - length:
        parts.append(node.tokens[max(0, end - length - node.start) : at - node.start])
        at = node.start
        if node.parent is not None:
            node = node.parent
    return np.concatenate(parts[::-1])


def _check_sizes(index: ContentIndex, segments: list[Segment]) -> None:
    config, size = index.config, index._size
    tables = [space.donors for space in index._namespaces.values()]
    num_tokens = sum(len(segment.tokens) for segment in segments)
    assert num_tokens == index._num_tokens, f"{num_tokens} tokens are stored, {index._num_tokens} are counted"
    assert num_tokens <= config.max_index_tokens, f"{num_tokens} tokens stored, {config.max_index_tokens} allowed"
    num_bytes = index.stats().num_bytes
    assert num_bytes <= config.max_index_bytes, f"{num_bytes} bytes used, {config.max_index_bytes} allowed"
    for name, counted, there in (
        ("donors", size.num_donors, sum(map(len, tables))),
        ("tails", size.num_tails, sum(len(table.heads) for table in tables)),
        ("filter slots", size.num_filter_slots, sum(table.num_filter_slots for table in tables)),
    ):
        assert counted == there, f"{there} {name} are there, {counted} are counted"
