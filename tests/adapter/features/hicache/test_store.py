"""The keys of rows in a store, and whose rows a server finds under them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from sglang_pic.adapter.features.hicache.drafts_on_host import is_stored_whole
from sglang_pic.adapter.features.hicache.host_tier import BackedPath
from sglang_pic.adapter.features.hicache.store import HiCacheStore, Write
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.startup.fingerprint import read_fingerprint
from sglang_pic.core import as_tokens
from sglang_pic.errors import UnsupportedError
from sglang_pic.runtime.views import PoolKind
from tests.helpers.host_rows import file_store


class HiCacheFile:
    """A store of a kind that gets approximate rows; the class's name says so."""


class OtherStore:
    """A store of another kind."""


def tier_on(backend: object, *, policy: bytes = b"", weights: bytes = b"rows") -> HiCacheStore:
    tree: Any = SimpleNamespace(
        page_size=16, enable_storage=True, cache_controller=SimpleNamespace(storage_backend=backend), ongoing=set()
    )
    tree.has_ongoing_prefetch = lambda handle: handle in tree.ongoing
    return HiCacheStore(tree, lambda: weights, policy=policy, publication=SimpleNamespace())  # type: ignore[arg-type]


PATH = BackedPath(Namespace(), as_tokens(range(96)), start=32, num_rows=96, pages=[f"page {at}" for at in range(6)])


def last_write(tier: HiCacheStore) -> Write | None:
    return tier.take_write(SimpleNamespace(hash_value=PATH.pages[2:]))


def test_approximate_pages_at_the_end_of_a_node_have_own_keys() -> None:
    tier = tier_on(HiCacheFile())
    for exact_end, num_own in ((96, 0), (64, 2), (40, 4), (0, 4)):
        assert tier.announce(PATH, exact_end)
        write = last_write(tier)
        assert write is not None
        assert len({*write.own_keys} - {*PATH.pages}) == num_own


def test_own_keys_are_those_of_one_model_and_one_policy() -> None:
    def key(**other: bytes) -> str:
        own_key = tier_on(HiCacheFile(), **other).own_key
        assert own_key is not None
        return own_key("page")

    assert key() == key()
    assert len({key(), key(policy=b"other"), key(weights=b"other")}) == 3


def test_other_stores_get_exact_rows_only() -> None:
    tier = tier_on(OtherStore())
    assert tier.announce(PATH, 96)
    assert last_write(tier) == Write("page 5", [])
    assert not tier.announce(PATH, 64)
    assert last_write(tier) is None


def test_new_weights_and_another_store_change_the_own_keys() -> None:
    """The fingerprint is read when the keys are needed, on all ranks together, and once."""
    tier, digests = tier_on(HiCacheFile()), iter((b"first", b"second"))
    tier._read_fingerprint = lambda: next(digests)
    first = tier.own_key
    assert first is not None
    assert tier.own_key is first
    tier.on_weights(tier._tree)  # type: ignore[arg-type]
    second = tier.own_key
    assert second is not None
    assert second("page") != first("page")
    tier._tree.enable_storage = False
    assert tier.own_key is None


def test_a_write_that_nobody_announced_leaves_the_announcements() -> None:
    tier = tier_on(HiCacheFile())
    for page in "abcd":
        tier.announce_exact(page)

    def taken(*pages: str) -> str | None:
        write = tier.take_write(SimpleNamespace(hash_value=[*pages]))
        return None if write is None else write.last_page

    assert [taken("x", "a"), taken("b", "y"), taken(), taken("c"), taken("b"), taken("d")] == [
        "a",
        None,
        None,
        "c",
        None,
        "d",
    ]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_page_is_found_with_what_stands_beside_it_under_the_same_key(is_there: bool, tmp_path: Path) -> None:
    """Two pages under SGLang's keys, two under ours, and two more; of the fourth the index keys may be gone."""
    backend: Any = file_store(tmp_path)
    tier, pages = tier_on(backend), [bytes([number] * 32).hex() for number in range(6)]
    own_key = tier.own_key
    assert own_key is not None
    keys = [own_key(page) if number in (2, 3) else page for number, page in enumerate(pages)]
    for key in [*keys, *(f"{key}.indexer" for key in keys if is_there or key != keys[3])]:
        backend.set(key, torch.zeros(1))
    # What stands beside a page under SGLang's key is not what stands beside it under ours.
    backend.set(f"{pages[3]}.indexer", torch.zeros(1))
    tier.note_prefetch("req", 0, range(96))
    side_pool = PoolTransfer(PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES)
    asked = SimpleNamespace(handle="req", all_hash_values=pages, pool_transfers=[side_pool])
    found = tier.extend_hit(asked, pages[:2], backend)
    assert found == pages[: 6 if is_there else 3]
    assert tier.keys_to_read(asked, found) == keys[: len(found)]


def test_servers_with_another_draft_have_another_fingerprint() -> None:
    """A page of a store has the draft's rows, too."""

    def fingerprint(*seeds: int) -> bytes:
        models: Any = [(SimpleNamespace(model=model(seed)), splicer) for seed in seeds]
        return read_fingerprint(models, host, None)

    def model(seed: int) -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return torch.nn.Linear(8, 8)

    view = SimpleNamespace(keys=[], values=[], kind="mha", dtype=torch.float32, num_layers=1, index_dtype=None)
    splicer: Any = SimpleNamespace(view=view, geometry=SimpleNamespace(layer_ids=[], params=[]))
    host: Any = SimpleNamespace(layout="layer_first", page_size=16)
    assert fingerprint(1, 2) == fingerprint(1, 2)
    assert len({fingerprint(1), fingerprint(1, 2), fingerprint(1, 3)}) == 3


@pytest.mark.parametrize(
    ("draft", "target", "num_ranks", "is_cut"),
    [
        (PoolKind.MHA, PoolKind.MLA, 2, True),
        (PoolKind.MHA, PoolKind.MLA, 1, False),
        (PoolKind.MHA, PoolKind.MHA, 2, False),
        (PoolKind.MLA, PoolKind.MLA, 2, False),
        (None, PoolKind.MLA, 2, False),
    ],
)
def test_no_store_takes_a_drafts_rows_of_one_rank_for_those_of_all(
    draft: PoolKind | None, target: PoolKind, num_ranks: int, *, is_cut: bool
) -> None:
    """SGLang writes latent rows, and what stands beside them, on the first rank alone."""
    drafts: Any = [] if draft is None else [SimpleNamespace(splicer=SimpleNamespace(view=SimpleNamespace(kind=draft)))]
    view: Any = SimpleNamespace(kind=target)
    ranks: Any = SimpleNamespace(world_size=num_ranks)
    assert is_stored_whole(drafts, view, ranks) is not is_cut
    assert is_stored_whole(drafts, view, None)
    with pytest.raises(UnsupportedError, match="latent rows once for all ranks") if is_cut else nullcontext():
        is_stored_whole(drafts, view, ranks, has_store=True)
