"""What a server tells routers: the namespaces that they can know, and no row that its tree has evicted."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_pic.adapter.features.content_events import ContentEvents
from sglang_pic.adapter.namespace import OFF_LANE, Namespace, announced_key, tree_key
from sglang_pic.adapter.serve.feature import Feature, Features
from sglang_pic.adapter.serve.publish import Publication
from sglang_pic.adapter.serve.traffic_log import TrafficLog
from sglang_pic.core import ContentIndex, RowNames, as_tokens
from tests.adapter.builders import make_allocator, make_tree, request
from tests.e2e.serving import random_tokens

_POOL, _LEN = 2048, 200


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (None, ""),
        ("tenant", "tenant"),
        (tree_key("tenant", generation=2, restarts=1), "tenant"),
        (tree_key(None, restarts=3), ""),
        (tree_key("tenant", lane=OFF_LANE), None),
        (tree_key(None, lane="most"), None),
        (tree_key("tenant" + "0" * 32, adapter="0" * 32), None),
    ],
)
def test_only_ordinary_requests_rows_are_told(key: str | None, told: str | None) -> None:
    assert announced_key(key) == told


class _Publisher:
    """Keeps what it is given, and at times is behind."""

    def __init__(self) -> None:
        self.donors: Counter[Any] = Counter()
        self.is_behind = False

    def put(self, changes: list[Any], *, is_all: bool = False) -> None:
        if is_all:
            self.donors.clear()
            self.is_behind = False
        for namespace, name, change in [] if self.is_behind else changes:
            self.donors[namespace, name] += change


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("is_eagle", [False, True], ids=["plain", "eagle"])
def test_what_the_tree_evicts_is_told_without_a_plan(page_size: int, is_eagle: bool) -> None:
    publisher: Any = _Publisher()
    events = ContentEvents(publisher)
    names = RowNames(page_size, int(is_eagle))
    index = ContentIndex(names=names, watch=events.note)
    publication = Publication(index, frozenset())
    allocator = make_allocator(_POOL, page_size)
    features = Features([events])
    tree: Any = make_tree(allocator, is_eagle=is_eagle, planning=None, features=features, publication=publication)
    for seed in range(8):
        tokens = random_tokens(seed, _LEN - _LEN % page_size + int(is_eagle))
        num_rows = (len(tokens) - names.lookahead) // page_size * page_size
        slots = allocator.alloc(num_rows)
        key = RadixKey(request(tokens).origin_input_ids)
        tree.insert(InsertParams(key=key, value=torch.cat([slots, slots[-1:]])[: len(tokens)]))
        index.publish(Namespace(), as_tokens(tokens), [(0, num_rows)])
        tree.flush_pending_backups()
    before = index.num_tokens
    assert _told(index) == +publisher.donors
    publisher.is_behind = True
    tree.evict(EvictParams(num_tokens=3 * _LEN))
    for _ in range(8):
        tree.flush_pending_backups()
    assert before - index.num_tokens >= 3 * (_LEN - page_size)
    assert index.num_tokens > 0
    assert _told(index) == +publisher.donors
    tree.reset()
    tree.flush_pending_backups()
    assert not +publisher.donors


def _told(index: ContentIndex) -> Counter[Any]:
    return Counter((space, name) for space, names in index.donor_names().items() for name in names)


class Audited(Feature):
    def summary(self) -> str:
        return "10 audits"


@pytest.mark.parametrize(
    ("features", "said"), [(Features(), "audits are off"), (Features([Feature(), Audited()]), "saved; 10 audits")]
)
def test_a_line_sums_up_a_minute(features: Features, said: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    log = TrafficLog(features, lambda: now)
    for now, is_new in ((5.0, True), (30.0, False), (64.9, True)):  # noqa: B007
        log.note(is_new=is_new, prefix=100, spliced=300, computed=600, saved_us=5e5)
    assert caplog.messages == []
    now = 125.0
    log.note(is_new=True, prefix=0, spliced=0, computed=1000, saved_us=0.0)
    (line,) = caplog.messages
    assert "120 s: 2 requests, 3000 prompt tokens: 10.0 % prefix hits, 30.0 % spliced, 60.0 % computed" in line
    assert "about 1.50 s of prefill saved" in line
    assert said in line
    now = 190.0
    log.note(is_new=True, prefix=0, spliced=0, computed=1000, saved_us=0.0)
    assert "65 s: 1 requests, 1000 prompt tokens: 0.0 %" in caplog.messages[1], "a line begins anew"
