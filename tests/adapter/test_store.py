"""What a store may cost: requests wait only so long, ranks take the same, and nobody asks in vain."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from sglang_pic.adapter.features.drafts.draft_on_host import is_stored_whole
from sglang_pic.adapter.features.hicache.store import _MAX_LISTINGS, LISTED, LOADED, LOOKUPS, StoreTier, Write
from sglang_pic.adapter.features.hicache.store_objects import objects_of
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.serve.state import LOADED_PATHS
from sglang_pic.adapter.startup.fingerprint import read_fingerprint
from sglang_pic.core import CoreConfig, Found, as_tokens
from sglang_pic.errors import UnsupportedError
from sglang_pic.runtime.views import PoolKind
from tests.adapter.builders import Kept, request
from tests.adapter.host_rows import file_store


class Tree:
    """SGLang's tree as far as the store's tier uses it; loads end when the test says so."""

    page_size, enable_storage, prefetch_stop_policy, hicache_storage_pass_prefix_keys = 16, True, "timeout", False
    prefetch_timeout_base, prefetch_timeout_per_page = 0.05, 0.0
    sidecar_pool_specs: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.cache_controller = SimpleNamespace(
            storage_backend=HiCacheFile(), storage_config=SimpleNamespace(is_mla_model=False, tp_rank=0)
        )
        self.loading: dict[Any, Sequence[int]] = {}
        self.lengths: dict[Any, int] = {}
        self.other_rank: list[int] = []
        """What another rank says next, where it says something else."""

    def match_prefix(self, _: object) -> Any:
        return SimpleNamespace(device_prefix_len=0, host_hit_length=0, last_host_node=0)

    def prefetch_from_storage(self, handle: Any, _: int, tokens: Sequence[int], *__: Any, **___: Any) -> None:
        self.loading[handle] = tokens

    def end_loads(self) -> None:
        self.lengths.update({handle: len(tokens) for handle, tokens in self.loading.items()})
        self.loading.clear()

    def has_ongoing_prefetch(self, handle: Any) -> bool:
        return handle in self.loading

    def pop_prefetch_loaded_span(self, handle: Any) -> tuple[int, int | None]:
        return self.lengths.pop(handle, 0), 0

    def is_root(self, _: int) -> bool:
        return True

    is_backuped = is_root

    def get_last_hash_value(self, _: int) -> None:
        return None

    def release_aborted_request(self, handle: Any) -> None:
        pass

    def _all_reduce(self, data: torch.Tensor, _: object) -> None:
        if self.other_rank:
            torch.minimum(data, torch.tensor(self.other_rank), out=data)
            self.other_rank = []


class HiCacheFile:
    """The name says which kind of store it is."""


class Directory:
    """Finds one path, once the test lets it."""

    block_tokens, fingerprint = 64, b"rows"

    def __init__(self) -> None:
        self.is_free, self.num_asked = threading.Event(), 0
        self.is_free.set()
        self.path = as_tokens(range(512))

    def find(self, *_: object) -> list[Found]:
        self.num_asked += 1
        assert self.is_free.wait(10)
        return [Found(self.path, torch.zeros(1, 32).numpy(), 400)]


class Server:
    """One rank's tier, and what it counted."""

    def __init__(self, cost: Any = None) -> None:
        self.tree, self.directory, self.counted = Tree(), Directory(), Kept()
        publication = SimpleNamespace(unknown=lambda *_: [(0, 300)])
        planning = SimpleNamespace(cost=cost, refusal=lambda _: None)
        self.tier = StoreTier(
            self.tree, lambda _: self.directory, planning=planning, publication=publication, series=self.counted
        )
        self.num_requests = 0

    def arrive(self) -> Any:
        self.num_requests += 1
        req = request(cache_request_handle=self.num_requests)
        self.tier.look_up(req)
        return req

    def step_until(self, holds: Any) -> None:
        deadline = time.monotonic() + 5
        while not holds():
            assert time.monotonic() < deadline
            self.tier.step()
            time.sleep(0.001)

    def is_ready(self, req: Any) -> bool:
        return self.tier.is_ready(req.cache_request_handle)

    def outcomes(self) -> dict[str | None, float]:
        return dict(self.counted.by_label(LOOKUPS))


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.directory.is_free.set()


def test_a_request_waits_until_what_was_found_has_come(server: Server) -> None:
    req = server.arrive()
    assert not server.is_ready(req)
    server.step_until(lambda: server.tree.loading)
    server.tree.prefetch_timeout_base = 5.0
    (handle,) = server.tree.loading
    assert not isinstance(handle.rid, str), "a client could send it"
    server.tree.end_loads()
    server.step_until(lambda: server.is_ready(req))
    assert server.counted.by_label(LOADED) == {None: 512}
    assert [(len(tokens), start) for tokens, start in req.pic.of_features[LOADED_PATHS]] == [(512, 0)]
    assert server.outcomes() == {"found": 1}
    server.tier.look_up(req)
    assert server.is_ready(req), "once is enough"


def test_nobody_waits_longer_than_computing_takes_and_a_late_store_is_not_asked_more(server: Server) -> None:
    """It goes on with what it was asked, and serves again when it has done that."""
    server.directory.is_free.clear()
    first, second = server.arrive(), server.arrive()
    server.step_until(lambda: server.is_ready(first) and server.is_ready(second))
    third = server.arrive()
    server.tier.step()
    assert server.is_ready(third)
    assert server.outcomes() == {"late": 2}
    server.directory.is_free.set()
    server.step_until(lambda: not server.is_ready(server.arrive()))
    server.step_until(lambda: server.tree.loading)
    assert server.directory.num_asked == 2, "the second look-up was dropped"


def test_loads_that_are_late_still_come_and_nothing_else_is_asked_meanwhile(server: Server) -> None:
    req = server.arrive()
    server.step_until(lambda: server.is_ready(req))
    assert server.tree.loading
    assert server.is_ready(server.arrive())
    server.tree.end_loads()
    server.tier.step()
    assert server.counted.by_label(LOADED) == {None: 512}
    assert not server.is_ready(server.arrive())


def test_ranks_that_found_other_paths_take_none(server: Server) -> None:
    server.arrive()
    server.step_until(lambda: server.directory.num_asked)
    waiting = server.tier._looking
    while not waiting[0].found.done():
        time.sleep(0.001)
    # The first reduction says that all are done; in the second the other rank has another digest.
    reductions = iter([[], [7, -7, 0]])
    reduce = server.tree._all_reduce

    def other_rank(data: torch.Tensor, operation: object) -> None:
        server.tree.other_rank = next(reductions)
        reduce(data, operation)

    server.tree._all_reduce = other_rank  # type: ignore[method-assign]
    server.tier.step()
    assert server.outcomes() == {"apart": 1}
    assert not server.tree.loading


def test_a_rank_goes_on_only_when_all_ranks_have_found(server: Server) -> None:
    req = server.arrive()
    while not server.tier._looking[0].found.done():
        time.sleep(0.001)
    server.tree.other_rank = [0, 0, 0, 0]
    server.tier.step()
    assert not server.is_ready(req)
    assert not server.tree.loading


def test_what_is_sooner_computed_is_not_loaded() -> None:
    server = Server(cost=SimpleNamespace(computed_token_us=1000.0))
    server.arrive()
    server.step_until(lambda: server.tree.loading)
    time.sleep(0.05)
    server.tree.end_loads()
    server.step_until(lambda: server.counted.by_label(LOADED) == {None: 512})
    # Loading took some 100 us a token: 512 of them for 400 that are computed in 40 us each.
    server.tier._planning.cost.computed_token_us = 40.0
    req = server.arrive()
    server.step_until(lambda: server.is_ready(req))
    assert not server.tree.loading


def test_a_store_that_fails_costs_reuse(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> list[Found]:
        raise OSError("the disk is gone")

    server.directory.find = fail  # type: ignore[method-assign]
    req = server.arrive()
    server.step_until(lambda: server.is_ready(req))
    assert server.outcomes() == {"nothing": 1}
    assert "the disk is gone" in caplog.text


def test_a_write_that_nobody_announced_leaves_the_announcements(server: Server) -> None:
    server.tier._writes.extend(Write(page) for page in "abcd")

    def taken(*pages: str) -> str | None:
        write = server.tier.take_write(SimpleNamespace(hash_value=[*pages]))
        return None if write is None else write.last_page

    assert [taken("x", "a"), taken("b", "y"), taken(), taken("c"), taken("b"), taken("d")] == [
        "a",
        None,
        None,
        "c",
        None,
        "d",
    ]


def test_a_store_that_hangs_holds_up_no_backup(server: Server) -> None:
    """What is to be listed waits on another thread, and no more of it than can be listed soon."""
    listed: list[int] = []

    def list_path(*_: object) -> None:
        listed.append(threading.get_ident())
        assert server.directory.is_free.wait(10)

    server.directory.list_path = list_path  # type: ignore[attr-defined]
    server.tier._sums = lambda slots: np.zeros(len(slots) // 16, np.uint64)  # type: ignore[method-assign]
    server.directory.is_free.clear()
    assert server.tier.directory is not None
    path = SimpleNamespace(
        namespace=Namespace(), slots=range(128), start=0, pages=["00"] * 8, tokens=as_tokens(range(128))
    )
    operation = SimpleNamespace(
        completed_tokens=128,
        pool_storage_result=SimpleNamespace(extra_pool_hit_pages={}),
        pool_transfers=None,
        host_indices=torch.arange(128),
    )
    for _ in range(2 * _MAX_LISTINGS):
        server.tier.backed_up(operation, Write("00", path=path, end=128, sums=np.zeros(0, np.uint64)))  # type: ignore[arg-type]
    server.directory.is_free.set()
    server.step_until(lambda: server.counted.by_label(LISTED) == {None: _MAX_LISTINGS * 128})
    assert len(listed) == _MAX_LISTINGS
    assert threading.get_ident() not in listed


def _make_directory(path: Path) -> None:
    path.mkdir()


def _make_short(path: Path) -> None:
    path.write_bytes(b"PIC1")


@pytest.mark.parametrize("make", [os.mkfifo, _make_directory, _make_short])
def test_what_is_no_object_under_its_name_is_one_without_content(make: Any, tmp_path: Path) -> None:
    backend = file_store(tmp_path)
    objects = objects_of(backend, SimpleNamespace(is_mla_model=True), [])
    assert objects is not None
    assert objects.get("pic-block", 8) is None
    make(tmp_path / f"{backend._get_suffixed_key('pic-block')}.bin")
    assert objects.get("pic-block", 8) == b""
    objects.put("pic-anchor", b"12345678")
    assert objects.get("pic-anchor", 8) == b"12345678"


def test_requests_that_leave_are_forgotten(server: Server) -> None:
    server.directory.is_free.clear()
    req = server.arrive()
    server.tier.abandon(req.cache_request_handle)
    assert server.is_ready(req)
    other = server.arrive()
    assert not server.is_ready(other)
    server.tier.on_flush()
    assert server.is_ready(other)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_page_is_found_with_what_stands_beside_it_under_the_same_key(is_there: bool, tmp_path: Path) -> None:
    """Two pages under SGLang's keys, two under ours, and two more; of the fourth the index keys may be gone."""
    backend: Any = file_store(tmp_path)
    server, index = Server(), SimpleNamespace(pool_name=PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES)
    tier, pages = server.tier, [bytes([number] * 32).hex() for number in range(6)]
    assert tier.directory is not None
    keys = [tier._own_key(page) if number in (2, 3) else page for number, page in enumerate(pages)]
    for key in [*keys, *(f"{key}.indexer" for key in keys if is_there or key != keys[3])]:
        backend.set(key, torch.zeros(1))
    # What stands beside a page under SGLang's key is not what stands beside it under ours.
    backend.set(f"{pages[3]}.indexer", torch.zeros(1))
    tier.note_prefetch("req", 0, range(96))
    asked = SimpleNamespace(
        handle="req", all_hash_values=pages, pool_transfers=[PoolTransfer(index.pool_name, hit_policy=index.hit_policy)]
    )
    found = tier.extend_hit(asked, pages[:2], backend)
    assert found == pages[: 6 if is_there else 3]
    assert tier.keys_to_read(asked, found) == keys[: len(found)]
    objects = objects_of(backend, SimpleNamespace(is_mla_model=True), [index])
    assert objects is not None
    assert [objects.has_rows(bytes.fromhex(key)) for key in keys] == [True, True, True, is_there, True, True]


def test_servers_with_another_draft_have_another_fingerprint() -> None:
    """A page of a store has the draft's rows, too."""

    def fingerprint(*seeds: int) -> bytes:
        models: Any = [(SimpleNamespace(model=model(seed)), splicer) for seed in seeds]
        return read_fingerprint(models, host, CoreConfig(), None)

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


def test_where_sglang_waits_for_nothing_nobody_waits(server: Server) -> None:
    server.tree.prefetch_stop_policy = "best_effort"
    assert server.is_ready(server.arrive())
