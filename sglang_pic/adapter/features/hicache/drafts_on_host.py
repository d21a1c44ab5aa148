"""The rows of a draft that HiCache keeps on the host, in the slots of its target's rows.

SGLang backs up and loads back the rows of draft and target in one operation, so the host has either both or none. If
the draft's layers are like the target's (NEXTN, with one layer per head), SGLang appends them to the target's host
pools, layers with windows to the host pool for windows. Any other draft has its own host pools, which SGLang registers
after the tree was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_pic.adapter.sglang.seams import TpGroup
from sglang_pic.adapter.startup.drafts import Draft, named
from sglang_pic.errors import Refused, UnsupportedError
from sglang_pic.runtime.fetch import Fetcher
from sglang_pic.runtime.live_pools import view_host_pool
from sglang_pic.runtime.views import PoolKind, PoolView
from sglang_pic.runtime.window_pool import view_window_host_pools

OTHER_HEADS = Refused("SGLang keeps rows only of the first head there", "start without --enable-hierarchical-cache")
OTHER_WINDOWS = Refused(
    "SGLang keeps them in a separate pool, which the plugin does not read",
    "start without --enable-hierarchical-cache",
)

CUT_BETWEEN_RANKS = Refused(
    "a store keeps latent rows once for all ranks, so it would keep only the first rank's heads of the draft",
    "start without --hicache-storage-backend",
)


def is_stored_whole(
    drafts: Sequence[Draft], target: PoolView, ranks: TpGroup | None, *, has_store: bool = False
) -> bool:
    """Whether a store keeps every rank's rows of the drafts; not if they are split by head and the target's are latent.

    Raises:
        UnsupportedError: it does not, and a store is attached.
    """
    by_head = any(draft.splicer.view.kind is PoolKind.MHA for draft in drafts)
    is_cut = by_head and target.kind is PoolKind.MLA and ranks is not None and ranks.world_size > 1
    if is_cut and has_store:
        raise UnsupportedError(CUT_BETWEEN_RANKS.line("a store of HiCache and a draft without latent rows"))
    return not is_cut


class DraftsOnHost:
    """Lets splices fetch the rows of drafts from the host.

    Args:
        drafts: of the server.
        params: SGLang's parameters of the tree, with the draft pools that are packed and those with own host pools.
        group: the host pools of the tree.
        fetchers: gets those of the drafts.

    Raises:
        UnsupportedError: the host does not keep a draft's rows, or they cannot be read there.
    """

    def __init__(self, drafts: Sequence[Draft], params: Any, group: Any, fetchers: list[Fetcher]) -> None:
        self._group, self._awaited, self._fetchers = group, list[Draft](), fetchers
        packed = params.mtp_draft_device_pools
        for draft in drafts:
            pool = draft.runner.token_to_kv_pool
            with named(draft.runner):
                if pool in packed:
                    self._bind_packed(draft, packed[: packed.index(pool)])
                elif draft.splicer.view.windows is not None:
                    raise UnsupportedError(OTHER_WINDOWS.line("its window rows on the host"))
                elif pool in params.sidecar_draft_device_pools:
                    self._awaited.append(draft)
                else:
                    raise UnsupportedError(OTHER_HEADS.line("a head's rows on the host"))

    def bind_registered(self) -> int:
        """Bind the draft with its own host pools if SGLang has registered all of them.

        Returns:
            The bytes of a token's rows in these pools; 0 if nothing was bound.

        Raises:
            UnsupportedError: the rows cannot be read there.
        """
        from sglang.srt.mem_cache.hicache_storage import PoolName

        found = self._group.entry_map
        for draft in self._awaited:
            names = [PoolName.DRAFT, *([PoolName.DRAFT_INDEXER] if draft.splicer.view.index else [])]
            if all(name in found for name in names):
                with named(draft.runner):
                    self._bind(draft, PoolName.DRAFT, PoolName.DRAFT_INDEXER)
                self._awaited.remove(draft)
                return sum(int(self._group.get_pool(name).size_per_token) for name in names)
        return 0

    def _bind_packed(self, draft: Draft, before: Sequence[Any]) -> None:
        """Bind a draft whose layers follow those of its target and of the pools `before` it."""
        from sglang.srt.mem_cache.hicache_storage import PoolName

        view = draft.splicer.view
        if view.windows is None:
            self._bind(draft, PoolName.KV, PoolName.INDEXER, packed_at=len(before))
            return
        whole, window = (
            sum(bool(getattr(each, part).layer_num) for each in before) for part in ("full_kv_pool", "swa_kv_pool")
        )
        pools = self._group.get_pool(PoolName.KV), self._group.get_pool(PoolName.SWA)
        self._fetchers.append(Fetcher(draft.splicer, view_window_host_pools(*pools, view, packed_at=(whole, window))))

    def _bind(self, draft: Draft, rows: Any, index: Any, *, packed_at: int | None = None) -> None:
        view = draft.splicer.view
        index_pool = self._group.get_pool(index) if view.index else None
        host = view_host_pool(self._group.get_pool(rows), view, index_pool, packed_at=packed_at)
        self._fetchers.append(Fetcher(draft.splicer, host))
