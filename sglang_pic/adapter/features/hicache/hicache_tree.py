"""The tree of a server with HiCache: what happens to rows on the host and in a store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from sglang.srt.mem_cache import base_prefix_cache as base

from sglang_pic.adapter.features.drafts.draft_on_host import DraftsOnHost
from sglang_pic.adapter.features.hicache.host_tier import HostTier
from sglang_pic.adapter.features.hicache.store import StoreTier
from sglang_pic.adapter.namespace import is_strict
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.tree import PicRadixCache
from sglang_pic.adapter.sglang.hooks import hook
from sglang_pic.adapter.sglang.seams import Req

NO_STORE: Final = (
    "A store of HiCache would take spliced window rows, or rows beside images, for computed ones, or rows of this "
    "draft for others; start without --radix-cache-backend pic to attach one."
)


class HiCacheTree(PicRadixCache):
    """`PicRadixCache` whose rows go to the host, and to a store if one is attached."""

    host: HostTier
    store: StoreTier | None = None
    """None beside windows in a pool of their own, images, and drafts whose rows SGLang's keys do not name."""
    drafts: DraftsOnHost | None = None
    """None until the host's pools are known."""

    def register_sidecar_pool(self, spec: Any, entry: Any = None) -> None:
        """Take note of another host pool as SGLang does; the pools of a draft come last."""
        super().register_sidecar_pool(spec, entry)
        if self.drafts is not None:
            self.host.token_bytes += self.drafts.bind_registered()

    def attach_storage_backend(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Attach a store of HiCache's to the running server, if it would tell spliced rows from computed ones."""
        if self.store is None:
            return False, NO_STORE
        attached: tuple[bool, str] = super().attach_storage_backend(*args, **kwargs)
        return attached

    def insert(self, params: base.InsertParams) -> base.InsertResult:
        """Insert as SGLang does, noting rows that were on the host only."""
        params.track_adopted_ranges = True
        return super().insert(params)

    def loading_check(self, finish_count: int | None = None) -> None:
        """Take note of loads from the host as SGLang does, and of rows that were fetched from there for splices."""
        super().loading_check(finish_count)
        self.host.give_back()

    def write_backup_storage(self, node_id: int) -> None:
        """Write rows to the store: under SGLang's keys as far as they are those that any server computes for the text.

        NOTE: those keys are made of tokens, the client's key and the salt, so a server without the plugin finds what is
        written under them, and so do requests that want exact rows. What came from a splice, or stands behind it, has
        keys of the plugin's own, where the store is of a kind that it can list.
        """
        extra_key, _ = self.tree_core.prefetch_anchor_info(node_id)
        if is_strict(extra_key):
            if self.store is not None:
                self.store.announce_exact(self.get_last_hash_value(node_id))
            super().write_backup_storage(node_id)
            return
        may_write = False
        with self.guarded(Fallback.FAULT_STORE):
            may_write = self._announce(node_id)
        if may_write:
            super().write_backup_storage(node_id)

    def _announce(self, node_id: int) -> bool:
        """Whether the rows of a node may be written; the store knows then what they are."""
        path = self.host.path_to(node_id)
        if path is None:
            return False
        num_rows = len(path.slots)
        exact_end = self.publication.exactness(path.namespace, path.tokens[:num_rows]).exact_len
        is_exact = exact_end >= num_rows
        if not is_exact and not self.publication.may_be_shared(path.namespace, path.tokens):
            return False
        return is_exact if self.store is None else self.store.announce(path, exact_end)

    def prefetch_from_storage(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Look for a prefix in the store as SGLang does."""
        # Before SGLang's threads see it.
        if self.store is not None and not self.has_ongoing_prefetch(request):
            self.store.note_prefetch(request, *args, **kwargs)
        return super().prefetch_from_storage(request, *args, **kwargs)

    def _handle_prefetch_result(self, operation: Any) -> None:
        """Put what came from the store into the tree as SGLang does, and publish it."""
        super()._handle_prefetch_result(operation)
        if self.store is not None:
            with self.guarded(Fallback.FAULT_PUBLICATION):
                self.store.publish(operation)

    def look_up(self, req: Req) -> None:
        """Look for the text of an arrived request in the store, beside SGLang's own look for its prefix."""
        if self.store is not None:
            with self.guarded(Fallback.FAULT_STORE):
                self.store.look_up(req)

    def check_hicache_events(self) -> None:
        """Go on with loads and backups as SGLang does, then with what was looked up in the store."""
        super().check_hicache_events()
        if self.store is not None:
            with self.guarded(Fallback.FAULT_STORE):
                self.store.step()

    def check_prefetch_progress(self, request: Any) -> bool:
        """Whether a request need not wait for the store: for its prefix, nor for its text."""
        is_done: bool = super().check_prefetch_progress(request)
        return is_done and (self.store is None or self.store.is_ready(request))

    def release_aborted_request(self, request: Any) -> None:
        """Forget what was looked up for a request that left, too."""
        super().release_aborted_request(request)
        if self.store is not None:
            self.store.abandon(request)


def install(tree: HiCacheTree, store: StoreTier) -> None:
    """Register the hooks of a server with HiCache, whose threads write to a store and read from it."""

    def after_prefetch(_: None, _scheduler: object, req: Req, *args: object, **kwargs: object) -> None:
        tree.look_up(req)

    # NOTE: what follows runs on SGLang's threads.
    def around_backup(original: Callable[..., None], controller: Any, operation: Any) -> None:
        write = store.take_write(operation)
        if write is None:
            return
        pages = operation.hash_value
        try:
            # SGLang gives the pages of side pools these keys, too.
            operation.hash_value = store.keys_to_write(operation, write)
            original(controller, operation)
        finally:
            operation.hash_value = pages
        store.backed_up(operation, write)

    def around_query(original: Callable[..., Any], controller: Any, operation: Any) -> tuple[list[str], int]:
        pages, _ = original(controller, operation)
        pages = store.extend_hit(operation, pages, controller.storage_backend)
        return pages, len(pages) * controller.page_size

    def around_agreement(original: Callable[..., int], controller: object, operation: Any, num_tokens: int) -> int:
        store.agree(operation, partial(original, controller, operation))
        return original(controller, operation, num_tokens)

    def around_transfer(
        original: Callable[..., int], controller: object, operation: Any, pages: Any, slots: Any, *args: object
    ) -> int:
        num_pages = original(controller, operation, store.keys_to_read(operation, pages), slots, *args)
        return store.check(operation, pages, slots, num_pages)

    hook(__name__, "Scheduler._prefetch_kvcache", after_prefetch)
    hook(__name__, "HybridCacheController._page_backup", around_backup)
    hook(__name__, "HybridCacheController._storage_hit_query", around_query)
    hook(__name__, "HybridCacheController._sync_prefetch_hit_query", around_agreement)
    hook(__name__, "HiCacheController._page_transfer_kv_batch", around_transfer)
