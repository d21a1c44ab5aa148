"""Content events: announces the chunks that have donors on this server to routers, on a port of their own.

Every rank changes its index alike; the first of those that serve the same requests publishes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

import msgspec
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_pic.adapter.metrics import Metric, MetricKind, Series
from sglang_pic.adapter.namespace import Namespace, announced_key
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Feature, PicTree
from sglang_pic.adapter.serve.media import TextOnly
from sglang_pic.adapter.sglang.seams import Tree
from sglang_pic.config import ContentEvents as ContentEventsConfig
from sglang_pic.core import ContentIndex, Tokens
from sglang_pic.route.announced import Change
from sglang_pic.route.publisher import Publisher, all_donors
from sglang_pic.route.wire import Cutting, namespace_bytes, read_salt

MESSAGES: Final = Metric(
    "sglang:pic_content_events_total",
    MetricKind.COUNTER,
    "Content events published, heartbeats included.",
)
BYTES: Final = Metric(
    "sglang:pic_content_events_bytes_total", MetricKind.COUNTER, "Bytes of content events, for one listener."
)
METRICS: Final = (MESSAGES, BYTES)

# Paths that are looked up in the tree after one round, about .1 ms each.
_MAX_CHECKS: Final = 4


class ContentEvents(Feature):
    """Collects the changed donors of a rank, and announces them to routers.

    Args:
        publisher: publishes the changes; None if another rank publishes.
        media: converts a path's tokens to SGLang's ids.
    """

    fault = Fallback.FAULT_PUBLICATION

    def __init__(self, publisher: Publisher | None, media: TextOnly | None = None) -> None:
        self._publisher, self._media = publisher, media or TextOnly()
        # Emptied by `_publish`.
        self._changes: list[Change] = []

    @property
    def publishes(self) -> bool:
        """Whether this rank publishes."""
        return self._publisher is not None

    def note(self, namespace: Hashable, name: int, change: int) -> None:
        """Record a donor of a chunk that was added or removed; for `ContentIndex`'s `watch`."""
        self._changes.append((namespace, name, change))

    def on_settled(self, tree: PicTree) -> None:
        index: ContentIndex = tree.publication.index
        self._forget_evicted(index, tree)
        self._publish(index)

    def on_weights(self, tree: PicTree) -> None:
        self.on_flush()

    def on_index_lost(self) -> None:
        self.on_flush()

    def on_flush(self) -> None:
        self._changes = []
        if self._publisher is not None:
            self._publisher.put([], is_all=True)

    def reports(self) -> dict[str, msgspec.Struct]:
        return {} if self._publisher is None else {"content_events": self._publisher.report()}

    def _forget_evicted(self, index: ContentIndex, tree: Tree) -> None:
        """Forget paths that the tree evicted, without waiting for a plan that needs them.

        While the index has more tokens than the tree, its least recently used paths are looked up in the tree. NOTE:
        with HiCache evicted rows are still spliced, from the host.
        """
        if tree.cache_controller is not None:
            return

        def resident_len(namespace: Hashable, tokens: Tokens) -> int:
            assert isinstance(namespace, Namespace), "publication.py names namespaces"
            key = RadixKey(self._media.ids(tokens), namespace.extra_key, cache_salt=namespace.cache_salt)
            return _resident_len(index, tree, key, len(tokens))

        for _ in range(_MAX_CHECKS):
            num_rows = tree.tree_core.full_evictable_size() + tree.tree_core.full_protected_size()
            if index.num_tokens <= num_rows or not index.recheck_oldest(resident_len):
                return

    def _publish(self, index: ContentIndex) -> None:
        """Pass the changes to the publisher's thread; never waits."""
        if self._publisher is None:
            return
        if self._publisher.is_behind:
            self._publish_all(index)
        elif self._changes:
            self._publisher.put(self._changes)
        self._changes = []

    def _publish_all(self, index: ContentIndex) -> None:
        assert self._publisher is not None
        self._publisher.put(all_donors(index.donor_names()), is_all=True)


def make_content_events(
    settings: ContentEventsConfig, cutting: Cutting, *, publishes: bool, series: Series, media: TextOnly
) -> ContentEvents:
    """The content events of one rank.

    Raises:
        ConfigError: the secret cannot be read, or the port is taken.
    """
    if not publishes:
        return ContentEvents(None, media)

    def count(size: int) -> None:
        series.add(MESSAGES)
        series.add(BYTES, size)

    salt = read_salt(settings.salt_file)
    return ContentEvents(Publisher(settings.endpoint, salt, cutting, _announced_namespace, count), media)


def _announced_namespace(namespace: Hashable) -> bytes | None:
    """The bytes of the namespace that its clients send; None for lanes and LoRA adapters, which routers cannot name."""
    assert isinstance(namespace, Namespace), "publication.py names namespaces"
    key = announced_key(namespace.extra_key)
    return None if key is None else namespace_bytes(key, namespace.cache_salt)


def _resident_len(index: ContentIndex, tree: Tree, key: RadixKey, path_len: int) -> int:
    """How many leading tokens of a path are on the device; all of them if only an incomplete page is not."""
    page_size, beyond = index.names
    num_rows, _, _ = tree.tree_core.match_full_device_prefix(key)
    if num_rows >= (path_len - beyond) // page_size * page_size:
        return path_len
    return num_rows + beyond if num_rows else 0
