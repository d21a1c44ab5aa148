"""The keys of rows in a store that servers share through HiCache.

SGLang writes a page of rows under a key made of the text up to its end, the client's `extra_key` and its salt. Under
that key any server finds the page, also one without the plugin, so only exact rows are written there. Approximate rows
(spliced rows, and rows computed after them) are written under keys of the plugin's own, which only servers with the
same model and the same reuse policy compute. Such a server loads them as a prefix, and never as donors.

SGLang writes the pages of side pools (index keys of sparse attention, rows of a draft) under the key of their rows, so
a page is found only if the store has the page of every pool under the same key.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_pic.adapter.features.hicache.drafts_on_host import is_stored_whole
from sglang_pic.adapter.features.hicache.host_tier import BackedPath
from sglang_pic.adapter.features.images import Images
from sglang_pic.adapter.features.parts import Parts
from sglang_pic.adapter.namespace import Namespace, is_strict
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Feature, PicTree
from sglang_pic.adapter.serve.publish import Publication
from sglang_pic.adapter.sglang.hooks import hook
from sglang_pic.adapter.sglang.seams import BuildContext, Tree
from sglang_pic.adapter.startup.fingerprint import read_fingerprint
from sglang_pic.core import Tokens, as_tokens

logger = logging.getLogger(__name__)

_TESTED: Final = frozenset({"HiCacheFile", "MooncakeStore"})
"""SGLang's classes of the stores that get approximate rows."""


class Write(NamedTuple):
    """A node of the tree that SGLang is about to write."""

    last_page: str
    """SGLang's key of its last page, by which the write is found again on SGLang's thread."""
    own_keys: Sequence[str] = ()
    """The keys of the approximate pages at its end."""


@dataclass(slots=True, eq=False)
class _Prefetch:
    """The prefix of a request that SGLang looks for in the store."""

    namespace: Namespace
    tokens: Tokens
    start: int
    own_key: Callable[[str], str] | None
    own: dict[str, str] = field(default_factory=dict)
    """The own key of each page that was found under it, by SGLang's key."""
    num_exact: int = 0
    """Tokens from `start` up to the first such page; the least over the ranks, once they have agreed."""


class HiCacheStore(Feature):
    """Gives approximate rows their own keys when SGLang writes to the store and reads from it.

    SGLang's threads call `take_write`, `extend_hit`, `agree` and `keys_to_read`; the scheduler's thread calls the rest.

    Args:
        tree: SGLang's tree, whose controller is attached; a store may be attached to it, or detached, at any time.
        read_fingerprint: returns a digest of the model and of all else that rows depend on beside tokens; a
            collective of all ranks.
        policy: the server's reuse policy; approximate rows of servers with another policy are not found.
        publication: publishes the loaded rows.
    """

    fault = Fallback.FAULT_STORE

    def __init__(
        self, tree: Tree, read_fingerprint: Callable[[], bytes], *, policy: bytes = b"", publication: Publication
    ) -> None:
        self._tree, self._publication = tree, publication
        self._read_fingerprint, self._policy = read_fingerprint, policy
        self._backend: object = None
        self._own_key: Callable[[str], str] | None = None
        self._writes: deque[Write] = deque()
        self._prefetches: dict[Any, _Prefetch] = {}

    @classmethod
    def make(cls, ctx: BuildContext, parts: Parts) -> HiCacheStore | None:
        """The tier of a server with HiCache, to which a store may be attached later.

        None with windows in a pool of their own, with images, and with drafts whose rows SGLang's keys do not name.

        Raises:
            UnsupportedError: a store is attached that would keep one rank's rows of a draft for all ranks.
        """
        tree, live, stations, view = parts.tree, parts.live, parts.stations, parts.live.splicer.view
        if not ctx.enable_hierarchical_cache or isinstance(stations.media, Images):
            return None
        is_whole = is_stored_whole(live.drafts, view, stations.ranks, has_store=tree.enable_storage)
        if not is_whole or len(live.drafts) > stations.index.names.lookahead or view.windows is not None:
            return None
        host_pool = tree.cache_controller.mem_pool_host.anchor_entry.host_pool
        models = [(ctx.tp_worker.model_runner, live.splicer), *((each.runner, each.splicer) for each in live.drafts)]
        # NOTE: after start-up only ranks that serve the same requests read the fingerprint at the same time.
        at_start = read_fingerprint(models, host_pool, ctx.tp_group)

        def fingerprint() -> bytes:
            return read_fingerprint(models, host_pool, stations.ranks) if tree.num_weights else at_start

        policy = msgspec.json.encode(stations.config.core)
        made = cls(tree, fingerprint, policy=policy, publication=stations.publication)
        made.install()
        return made

    def install(self) -> None:
        """Hook SGLang's threads that write to a store and read from it."""

        # NOTE: these run on SGLang's threads.
        def around_backup(original: Callable[..., None], controller: Any, operation: Any) -> None:
            write = self.take_write(operation)
            if write is None:
                return
            pages = operation.hash_value
            try:
                # SGLang writes the pages of side pools under these keys, too.
                operation.hash_value = [*pages[: len(pages) - len(write.own_keys)], *write.own_keys]
                original(controller, operation)
            finally:
                operation.hash_value = pages

        def around_query(original: Callable[..., Any], controller: Any, operation: Any) -> tuple[list[str], int]:
            pages, _ = original(controller, operation)
            pages = self.extend_hit(operation, pages, controller.storage_backend)
            return pages, len(pages) * controller.page_size

        def around_agreement(original: Callable[..., int], controller: object, operation: Any, num_tokens: int) -> int:
            self.agree(operation, partial(original, controller, operation))
            return original(controller, operation, num_tokens)

        def around_transfer(
            original: Callable[..., int], controller: object, operation: Any, pages: Any, slots: Any, *args: object
        ) -> int:
            return original(controller, operation, self.keys_to_read(operation, pages), slots, *args)

        hook(__name__, "HybridCacheController._page_backup", around_backup)
        hook(__name__, "HybridCacheController._storage_hit_query", around_query)
        hook(__name__, "HybridCacheController._sync_prefetch_hit_query", around_agreement)
        hook(__name__, "HiCacheController._page_transfer_kv_batch", around_transfer)

    # ---- Writes ----

    def announce(self, path: BackedPath, exact_end: int) -> bool:
        """Note the keys of the node at the end of a path, which SGLang is about to write.

        Args:
            path: the whole path.
            exact_end: rows from this position on are approximate.

        Returns:
            Whether SGLang may write it; False if rows are approximate and the store gets none of those.
        """
        page_size, own_key = self._tree.page_size, self.own_key
        approximate = path.pages[max(exact_end, path.start) // page_size :]
        if approximate and own_key is None:
            return False
        own_keys = [own_key(page) for page in approximate] if own_key is not None else []
        self._writes.append(Write(path.pages[-1], own_keys))
        return True

    def announce_exact(self, last_page: str | None) -> None:
        """Note that SGLang is about to write a node of exact rows."""
        if last_page is not None:
            self._writes.append(Write(last_page))

    def take_write(self, operation: Any) -> Write | None:
        """The announced write of an operation; SGLang runs them in the order of their announcements.

        NOTE: None for a write that was not announced. It must be skipped, because its rows may be approximate.
        """
        last_page = operation.hash_value[-1] if operation.hash_value else None
        # A copy, because the scheduler's thread appends to it.
        is_announced = any(write.last_page == last_page for write in self._writes.copy())
        while is_announced and self._writes:
            write = self._writes.popleft()
            # SGLang dropped the writes before this one.
            if write.last_page == last_page:
                return write
        return None

    # ---- Prefetches ----

    def note_prefetch(
        self, handle: Any, _: Any, ids: Any, *__: Any, matched_prefix_tokens: Any = (), **space: Any
    ) -> None:
        """Note that SGLang is about to look for `ids`, which follow `matched_prefix_tokens`, in the store."""
        start = len(matched_prefix_tokens or ())
        path = np.concatenate([np.asarray(matched_prefix_tokens or (), np.int64), np.asarray(ids, np.int64)])
        namespace = Namespace(space.get("extra_key"), space.get("cache_salt"))
        own_key = None if is_strict(namespace.extra_key) else self.own_key
        self._prefetches[handle] = _Prefetch(namespace, as_tokens(path), start, own_key)

    def extend_hit(self, operation: Any, pages: list[str], backend: Any) -> list[str]:
        """The pages of a prefix that the store has: `pages` under SGLang's keys, then pages under either key."""
        prefetch = self._prefetches.get(operation.handle)
        if prefetch is None:
            return pages
        num_found = len(pages)
        prefetch.num_exact = num_found * self._tree.page_size
        own_key, wanted, side_pools = prefetch.own_key, operation.all_hash_values or [], operation.pool_transfers or ()
        while own_key is not None and (rest := wanted[num_found:]):
            own_keys = [own_key(page) for page in rest]
            num_own = _num_stored(backend, own_keys, side_pools)
            prefetch.own.update(zip(rest[:num_own], own_keys, strict=False))
            after = rest[num_own:] if num_own else []
            num_more = _num_stored(backend, after, side_pools) if after else 0
            num_found += num_own + num_more
            if not num_more:
                break
        return wanted[:num_found] if prefetch.own else pages

    def agree(self, operation: Any, agree: Callable[[int], int]) -> None:
        """Set the number of exact tokens of a hit to the least over the ranks, which `agree` returns."""
        prefetch = self._prefetches.get(operation.handle)
        num_exact = agree(0 if prefetch is None else prefetch.num_exact)
        if prefetch is not None:
            prefetch.num_exact = num_exact

    def keys_to_read(self, operation: Any, pages: list[str]) -> list[str]:
        """The keys under which the pages of a hit are read."""
        prefetch = self._prefetches.get(operation.handle)
        return pages if prefetch is None else [prefetch.own.get(page, page) for page in pages]

    def publish(self, operation: Any) -> None:
        """Publish the rows that SGLang has loaded into the tree; only exact ones become donors."""
        prefetch = self._prefetches.pop(operation.handle, None)
        num_loaded = self._tree.prefetch_loaded_tokens_by_reqid.get(operation.handle, 0)
        start = self._tree.prefetch_loaded_storage_start_by_reqid.get(operation.handle)
        if prefetch is not None and num_loaded and start is not None and not is_strict(prefetch.namespace.extra_key):
            span, exact_end = (start, start + num_loaded), prefetch.start + prefetch.num_exact
            space, tokens = prefetch.namespace, prefetch.tokens
            # Another request may have computed or spliced some of them meanwhile: SGLang keeps both copies then.
            key = RadixKey(array("q", tokens.astype(np.int64).tobytes()), space.extra_key, cache_salt=space.cache_salt)
            on_device = self._tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
            self._publication.publish_loaded(space, tokens, span, exact_end, on_device=on_device)

    def forget(self, handle: Any) -> None:
        """Forget the prefetch of a request that was aborted."""
        self._prefetches.pop(handle, None)

    def forget_ended(self) -> None:
        """Forget prefetches that have ended without a result."""
        for handle in [handle for handle in self._prefetches if not self._tree.has_ongoing_prefetch(handle)]:
            del self._prefetches[handle]

    # ---- The store ----

    @property
    def own_key(self) -> Callable[[str], str] | None:
        """Makes the own key of a page from SGLang's; None without a store, or with one that gets no approximate rows.

        All ranks must ask together, because the first to ask after a store was attached reads the fingerprint.
        """
        backend = self._tree.cache_controller.storage_backend if self._tree.enable_storage else None
        if backend is not self._backend:
            self._backend, self._own_key = backend, None
            kind = type(backend).__name__
            if kind in _TESTED:
                fingerprint = self._read_fingerprint()

                def own_key(page: str) -> str:
                    return hashlib.blake2b(page.encode() + self._policy, key=fingerprint, digest_size=32).hexdigest()

                self._own_key = own_key
            elif backend is not None:
                logger.info("sglang_pic: %s: only exact rows are written to this store", kind)
        return self._own_key

    def on_weights(self, tree: PicTree) -> None:
        """Read the fingerprint again before the next use."""
        self._backend = self._own_key = None

    def on_flush(self) -> None:
        self._writes.clear()
        self._prefetches.clear()


def _num_stored(backend: Any, keys: list[str], side_pools: Sequence[Any]) -> int:
    """How many of the first `keys` a store has, each with its page of every side pool (SGLang's `PoolTransfer`)."""
    if side_pools:
        return int(backend.batch_exists_v2(keys, side_pools).kv_hit_pages)
    return int(backend.batch_exists(keys))
