"""Checks the invariants of a chunk index between calls, for tests and for experiments on servers. Cost O(index)."""

from __future__ import annotations

import numpy as np

from sglang_pic.core import token_loops
from sglang_pic.core.donors import MAX_DONORS_PER_ENDING, NONE, DonorTable
from sglang_pic.core.index import ContentIndex
from sglang_pic.core.spans import merge_spans
from sglang_pic.core.token_loops import ENDING_LEN
from sglang_pic.core.trie import Node, Trie, tokens_before


def check(index: ContentIndex) -> None:
    """Check all invariants.

    Raises:
        AssertionError: the message names the invariant and the node, donor or size that breaks it.
    """
    index.settle()
    nodes: list[Node] = []
    for namespace, space in index._namespaces.items():
        assert space.trie.namespace == namespace, f"{namespace!r}: its trie belongs to {space.trie.namespace!r}"
        assert space.trie.root.children, f"{namespace!r}: an empty namespace was kept"
        found = _check_trie(space.trie)
        _check_lists(space.donors, space.trie, index.config.max_donors_per_chunk)
        _check_donors(space.donors, found)
        nodes += found
    _check_ages(index, nodes)
    _check_sizes(index, nodes)


def _check_trie(trie: Trie) -> list[Node]:
    """The nodes of a trie, each one checked against its parent."""
    assert trie.root.start == 0, "a root begins at position 0"
    assert not len(trie.root.tokens), "a root has no tokens"
    assert not trie.root.donors, "a root has no donors"
    found = list(trie.root.children.values())
    for node in found:
        where = f"{trie.namespace!r}, node {node.serial} [{node.start}, {node.end})"
        parent = node.parent
        assert node.trie is trie, f"{where}: belongs to another trie"
        assert len(node.tokens), f"{where}: empty"
        assert parent is not None, f"{where}: in the trie, but marked as removed"
        assert parent.end == node.start, f"{where}: its parent ends at {parent.end}"
        assert parent.children.get(int(node.tokens[0])) is node, f"{where}: not under its first token"
        for what, spans in (("eligible", node.eligible), ("approximate", node.approximate)):
            assert spans == merge_spans(spans), f"{where}: {what} spans not in order: {spans}"
            for start, end in spans:
                assert node.start <= start < end <= node.end, f"{where}: {what} span [{start}, {end}) leaves it"
        assert node.generations == sorted(set(node.generations)), f"{where}: generations not in order"
        for position, _ in node.generations:
            assert node.start <= position < node.end, f"{where}: a generation begins at {position}, outside"
        found.extend(node.children.values())
    return found


def _check_ages(index: ContentIndex, nodes: list[Node]) -> None:
    ages = {serial: age for age, serial in enumerate(index._ages)}
    assert len(ages) == len(nodes), f"{len(nodes)} nodes are stored, {len(ages)} have an age"
    for node in nodes:
        assert index._ages.get(node.serial) is node, f"node {node.serial} has no age"
        for child in node.children.values():
            assert ages[child.serial] < ages[node.serial], (
                f"node {node.serial} is older than its child {child.serial}: it would be evicted first"
            )


def _check_lists(table: DonorTable, trie: Trie, max_per_name: int) -> None:
    num_listed = 0
    for ending in table.heads:
        donors = table.of(ending)
        num_listed += len(donors)
        assert len(set(donors)) == len(donors), f"ending {ending:x}: a donor is listed twice"
        assert len(donors) <= MAX_DONORS_PER_ENDING, f"ending {ending:x}: {len(donors)} donors"
        assert len(table.filter.candidates(np.array([ending], np.uint32))), (
            f"ending {ending:x}: the filter does not let it pass"
        )
        names = [table.names[donor] for donor in donors]
        for donor in donors:
            node = table.nodes[donor]
            assert node is not None, f"donor {donor}: listed, but removed"
            assert node.trie is trie, f"donor {donor}: lies in namespace {node.trie.namespace!r}"
            assert table.endings[donor] == ending, f"donor {donor}: listed under another ending"
            times = names.count(table.names[donor])
            assert times <= max_per_name, f"donor {donor}: {times} of its name, {max_per_name} are allowed"
    assert num_listed == len(table), f"{len(table)} donors are counted, {num_listed} are listed"
    assert not table.filter.is_stale(len(table.heads)), "the filter lets pass what has long been removed"


def _check_donors(table: DonorTable, nodes: list[Node]) -> None:
    num_held = 0
    for node in nodes:
        num_held += len(node.donors)
        for donor in node.donors:
            start, end = table.starts[donor], table.end(donor)
            where = f"donor {donor} [{start}, {end}) of node {node.serial} [{node.start}, {node.end})"
            assert table.nodes[donor] is node, f"{where}: points elsewhere"
            assert 0 <= start <= end - ENDING_LEN, f"{where}: shorter than an ending"
            assert node.start < end <= node.end, f"{where}: its last token lies elsewhere"
            assert node.eligible_around(end - 1) is not None, f"{where}: its last token is not eligible"
            chunk = tokens_before(node, end, table.lengths[donor])
            assert int(token_loops.hash_endings(chunk[-ENDING_LEN:])[0]) == table.endings[donor], (
                f"{where}: its ending is another"
            )
            assert table.hash_function(chunk.data.cast("B")) == table.names[donor], f"{where}: its name is another"
    assert num_held == len(table), f"{len(table)} donors are counted, nodes hold {num_held}"
    num_pointing = sum(1 for node in table.nodes if node is not None)
    assert num_pointing == len(table), f"{len(table)} donors are counted, {num_pointing} have a node"
    assert NONE == -1, "NONE marks the end of a list"


def _check_sizes(index: ContentIndex, nodes: list[Node]) -> None:
    config, size = index.config, index.size
    tables = [space.donors for space in index._namespaces.values()]
    num_tokens = sum(len(node.tokens) for node in nodes)
    assert num_tokens == index.num_tokens, f"{num_tokens} tokens are stored, {index.num_tokens} are counted"
    assert num_tokens <= config.max_index_tokens, f"{num_tokens} tokens stored, {config.max_index_tokens} allowed"
    num_bytes = index.num_bytes
    assert num_bytes <= config.max_index_bytes, f"{num_bytes} bytes used, {config.max_index_bytes} allowed"
    for name, counted, there in (
        ("donors", size.num_donors, sum(map(len, tables))),
        ("endings", size.num_endings, sum(len(table.heads) for table in tables)),
        ("filter slots", size.num_filter_slots, sum(table.filter.num_slots for table in tables)),
    ):
        assert counted == there, f"{there} {name} are there, {counted} are counted"
