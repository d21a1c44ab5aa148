"""The radix tree of a server with HiCache, whose rows may also be on the host and in a store."""

from __future__ import annotations

from typing import Any, Final

from sglang.srt.mem_cache import base_prefix_cache as base

from sglang_pic.adapter.features.hicache.host_tier import HostTier
from sglang_pic.adapter.features.hicache.store import HiCacheStore
from sglang_pic.adapter.namespace import is_strict
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.tree import PicRadixCache

NO_STORE: Final = (
    "A store of HiCache cannot distinguish spliced window rows or rows beside images from computed ones, or the rows "
    "of this draft from others; start without --radix-cache-backend pic to attach one."
)


class HiCacheTree(PicRadixCache):
    """`PicRadixCache` with rows on the host, and in a store if one is attached."""

    @property
    def host(self) -> HostTier | None:
        """None until SGLang has made the host's pools."""
        return self.features.find(HostTier)

    @property
    def store(self) -> HiCacheStore | None:
        """None where `HiCacheStore.make` makes none."""
        return self.features.find(HiCacheStore)

    def register_sidecar_pool(self, spec: Any, entry: Any = None) -> None:
        """Register another host pool as SGLang does, and bind the draft's host pools, which are registered last."""
        super().register_sidecar_pool(spec, entry)
        if self.host is not None:
            self.host.bind_registered()

    def attach_storage_backend(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Attach a store to the running server; refuse one that cannot distinguish spliced rows from computed ones."""
        if self.store is None:
            return False, NO_STORE
        attached: tuple[bool, str] = super().attach_storage_backend(*args, **kwargs)
        return attached

    def insert(self, params: base.InsertParams) -> base.InsertResult:
        """Insert as SGLang does, and report which rows were on the host only."""
        params.track_adopted_ranges = True
        return super().insert(params)

    def loading_check(self, finish_count: int | None = None) -> None:
        """Finish loads from the host as SGLang does, and unlock host rows that splices have read."""
        super().loading_check(finish_count)
        if self.host is not None:
            self.host.unlock_read()

    def write_backup_storage(self, node_id: int) -> None:
        """Write the rows of a node to the store: exact rows under SGLang's keys, approximate rows under our own.

        NOTE: SGLang's keys are made of tokens, the client's key and the salt. Servers without the plugin, and requests
        that want exact rows, read all rows that have such keys.
        """
        extra_key, _ = self.tree_core.prefetch_anchor_info(node_id)
        if is_strict(extra_key):
            if self.store is not None:
                self.store.announce_exact(self.get_last_hash_value(node_id))
            super().write_backup_storage(node_id)
            return
        may_write = False
        with self._recovery.guarded(Fallback.FAULT_STORE):
            may_write = self._announce(node_id)
        if may_write:
            super().write_backup_storage(node_id)

    def _announce(self, node_id: int) -> bool:
        """Whether the rows of a node may be written; if so, their keys are announced to the store."""
        path = None if self.host is None else self.host.path_to(node_id)
        if path is None:
            return False
        index = self.publication.index
        exact_end = index.exactness(path.namespace, path.tokens[: path.num_rows]).exact_len
        is_exact = exact_end >= path.num_rows
        if not is_exact and index.generation(path.namespace, path.tokens) > index.config.max_generation:
            return False
        return is_exact if self.store is None else self.store.announce(path, exact_end)

    def prefetch_from_storage(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Look for a prefix in the store as SGLang does, and for pages under our own keys."""
        # Before SGLang's threads see the request.
        if self.store is not None and not self.has_ongoing_prefetch(request):
            with self._recovery.guarded(Fallback.FAULT_STORE):
                self.store.note_prefetch(request, *args, **kwargs)
        return super().prefetch_from_storage(request, *args, **kwargs)

    def _handle_prefetch_result(self, operation: Any) -> None:
        """Insert rows from the store as SGLang does, and publish them."""
        super()._handle_prefetch_result(operation)
        if self.store is not None:
            with self._recovery.guarded(Fallback.FAULT_PUBLICATION):
                self.store.publish(operation)

    def check_hicache_events(self) -> None:
        """Process finished loads and backups as SGLang does, and forget prefetches that ended without a result."""
        super().check_hicache_events()
        if self.store is not None:
            self.store.forget_ended()

    def release_aborted_request(self, request: Any) -> None:
        """Release an aborted request as SGLang does, and forget its prefetch."""
        super().release_aborted_request(request)
        if self.store is not None:
            self.store.forget(request)
