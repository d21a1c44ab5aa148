"""Rows on the host: read where SGLang's host pools put them, and in the right order with its own copies."""

from __future__ import annotations

import dataclasses
from collections import deque
from contextlib import ExitStack
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pic_kernels import RopeParams
from pic_kernels.index_pages import quantise, read_keys, split_pages
from pic_platform import host_tier as platform
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import nn

from sglang_pic.adapter.features.hicache.drafts_on_host import DraftsOnHost
from sglang_pic.adapter.features.hicache.hicache_tree import NO_STORE, HiCacheTree
from sglang_pic.adapter.features.hicache.host_tier import HostReads, HostTier
from sglang_pic.adapter.features.hicache.store import HiCacheStore
from sglang_pic.adapter.features.window_rows import WindowsOnHost, WindowTier
from sglang_pic.adapter.serve.feature import Features
from sglang_pic.adapter.serve.rows import Found, Piece, Place, Splice
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.errors import UnsupportedError
from sglang_pic.runtime import RopeGeometry, Splicer, read_geometry, view_pool
from sglang_pic.runtime.fetch import Fetcher
from sglang_pic.runtime.host_rows import LAYOUTS
from sglang_pic.runtime.index_keys import IndexRope
from sglang_pic.runtime.live_pools import view_host_pool
from sglang_pic.runtime.window_pool import view_window_host_pools
from tests.helpers.builders import make_path, make_pool, plan
from tests.helpers.rope_models import RadixAttention

LAYERS = 3


@pytest.fixture(autouse=True)
def on_a_cpu() -> None:
    """As the platform does in every process of a server."""
    platform.install()


def pools(
    kind: str, page_size: int, layout: str, dtype: torch.dtype, *, num_packed: int = 0
) -> tuple[list[Any], Any, list[Splicer]]:
    """A pool of random rows with those of drafts of one layer, their host pool, and what moves the rows of each."""
    found = [
        make_pool(kind, size=128, page_size=page_size, dtype=dtype, layer_num=layers)
        for layers in (LAYERS, *[1] * num_packed)
    ]
    host_common: dict[str, Any] = {"pin_memory": False, "device_capacity_tokens": 128, "start_layer": 0}
    host_common |= {"end_layer": LAYERS - 1}
    make = MHATokenToKVPoolHost if kind == "mha" else MLATokenToKVPoolHost
    if kind == "mla":
        host_common |= {"layer_shard_enabled": False, "target_layer_num": LAYERS}
    for buffer in chain.from_iterable(map(buffers_of, found)):
        buffer.copy_(torch.randn(buffer.shape).to(dtype).view(buffer.dtype))
    info, *drafts = (pool.get_device_pool_infos()[0].buffer_info for pool in found)
    host = make(info, 3.0, 0, page_size, layout, draft_buffer_infos=drafts, **host_common)
    rotary = factory.get_rope(64, 64, 2_048, 10_000, True, None, dtype=torch.float32)
    layers = [nn.ModuleDict({"rotary_emb": rotary, "attn": RadixAttention(i)}) for i in range(LAYERS)]
    geometries = [
        read_geometry(nn.ModuleList(layers[:number]), max_shift=2_048) for number in (LAYERS, *[1] * num_packed)
    ]
    return found, host, [*map(Splicer, map(view_pool, found), geometries)]


def buffers_of(pool: Any) -> list[torch.Tensor]:
    return [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else [*pool.kv_buffer]


def back_up(found: list[Any], host: Any, host_slots: torch.Tensor, slots: torch.Tensor) -> None:
    """Rows of a pool and of drafts go to their host pool, by SGLang's own copies where they are no kernels."""
    if host.layout != "page_first":
        host.backup_from_device_all_layer(found[0], host_slots, slots, "direct")
        return
    # SGLang has kernels only for this layout: row by row through the views that it makes for them.
    if hasattr(found[0], "k_buffer"):
        here = [*(b for pool in found for b in pool.k_buffer), *(b for pool in found for b in pool.v_buffer)]
        there = [*host.k_data_refs, *host.v_data_refs]
    else:
        here, there = [b for pool in found for b in pool.kv_buffer], host.data_refs
    for row, buffer in zip(there, here, strict=True):
        row.view(torch.uint8)[host_slots] = buffer.view(torch.uint8)[slots]


def assert_fetched_as_spliced(
    splicer: Splicer, fetcher: Fetcher, host_slots: torch.Tensor, slots: torch.Tensor
) -> None:
    """To the last bit, in slots `[64, 100)`."""
    dst, shifts = torch.arange(64, 100), torch.full((36,), 77)
    buffers = (*splicer.view.keys, *splicer.view.values)
    splicer.splice(slots[5:41], dst, shifts)
    there = [buffer[64:100].clone() for buffer in buffers]
    splicer.view.fill(dst, 0)
    fetcher.fetch(host_slots[5:41], dst, shifts)
    for buffer, expected in zip(buffers, there, strict=True):
        assert torch.equal(buffer[64:100].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.feature("HiCache")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_rows_are_read_where_sglang_put_them(kind: str, layout: str, page_size: int, dtype: torch.dtype) -> None:
    """As if they had never left the device, whatever the layout; SGLang's own copies wrote them."""
    found, host, (splicer,) = pools(kind, page_size, layout, dtype)
    fetcher = Fetcher(splicer, view_host_pool(host, splicer.view))
    slots, host_slots = torch.arange(16, 64), host.alloc(96)[-48:]
    back_up(found, host, host_slots, slots)
    assert_fetched_as_spliced(splicer, fetcher, host_slots, slots)
    with pytest.raises(ValueError, match="max_shift=2048"):
        fetcher.fetch(host_slots[:36], torch.arange(64, 100), torch.full((36,), 2_077))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scaled_rows_are_read_where_sglang_put_them(layout: str) -> None:
    """128 FP8 values, a scale and 64 rotary values in bfloat16; `packed_fp8` in SGLang's words."""
    row: dict[str, Any] = {"kv_lora_rank": 128, "qk_rope_head_dim": 64, "kv_cache_dim": 260, "index_head_dim": 128}
    with get_parallel().override(attn_dcp_size=1):
        pool = memory_pool.DSATokenToKVPool(
            **row,
            size=320,
            page_size=64,
            dtype=torch.float8_e4m3fn,
            layer_num=LAYERS,
            enable_memory_saver=False,
            device="cpu",
            skip_topk_layers=[False] * LAYERS,
        )
    for buffer in pool.kv_buffer:
        buffer.copy_(torch.randint(256, buffer.shape, dtype=torch.uint8))
        buffer[..., 132:] = torch.randn(len(buffer), 1, 64).to(torch.bfloat16).view(torch.uint8)
    common: dict[str, Any] = {"pin_memory": False, "device_capacity_tokens": 320, "start_layer": 0}
    common |= {"end_layer": LAYERS - 1, "target_layer_num": LAYERS, "override_kv_cache_dim": 260}
    host = MLATokenToKVPoolHost(pool.get_device_pool_infos()[0].buffer_info, 3.0, 0, 64, layout, **common)
    rope = RopeParams(inv_freq=10_000.0 ** (-torch.arange(32) / 32), rotary_dim=64, is_neox_style=True)
    view = dataclasses.replace(view_pool(pool), index=())
    assert (view.num_scaled, view.rope_offset) == (128, 66)
    splicer = Splicer(view, RopeGeometry(tuple(range(LAYERS)), (rope,) * LAYERS, 2_048))
    fetcher = Fetcher(splicer, view_host_pool(host, view))
    slots, host_slots = torch.arange(128, 192), host.alloc(128)[-64:]
    back_up([pool], host, host_slots, slots)
    assert_fetched_as_spliced(splicer, fetcher, host_slots, slots)


def draft_of(pool: Any, splicer: Splicer) -> Any:
    fields = {"token_to_kv_pool": pool, "spec_algorithm": SpeculativeAlgorithm.EAGLE, "model": nn.Identity()}
    return SimpleNamespace(runner=SimpleNamespace(**fields), splicer=splicer)


def group_of(**host_pools: Any) -> Any:
    """SGLang's group of host pools, by their names."""
    entries = [PoolEntry(PoolName(name), each, None, lambda layer: layer) for name, each in host_pools.items()]
    return HostPoolGroup(entries)


@pytest.mark.feature("HiCache with speculative decoding")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_rows_of_packed_drafts_are_read_behind_their_targets(kind: str, layout: str) -> None:
    """Of two heads with one layer each."""
    found, host, (_, *heads) = pools(kind, 16, layout, torch.bfloat16, num_packed=2)
    params = SimpleNamespace(mtp_draft_device_pools=tuple(found[1:]), sidecar_draft_device_pools=())
    fetchers: list[Fetcher] = []
    DraftsOnHost([*map(draft_of, found[1:], heads)], params, group_of(kv=host), fetchers)
    slots, host_slots = torch.arange(16, 64), host.alloc(96)[-48:]
    back_up(found, host, host_slots, slots)
    for head, fetcher in zip(heads, fetchers, strict=True):
        assert_fetched_as_spliced(head, fetcher, host_slots, slots)


@pytest.mark.feature("HiCache with speculative decoding")
def test_rows_of_other_drafts_are_read_from_their_own_host_pool_once_it_is_there() -> None:
    (pool,), host, (splicer,) = pools("mha", 16, "layer_first", torch.bfloat16)
    params = SimpleNamespace(mtp_draft_device_pools=(), sidecar_draft_device_pools=(pool,))
    group = group_of(kv=pools("mla", 16, "layer_first", torch.bfloat16)[1])
    fetchers: list[Fetcher] = []
    drafts = DraftsOnHost([draft_of(pool, splicer)], params, group, fetchers)
    assert drafts.bind_registered() == 0
    group.add_entry(PoolEntry(PoolName.DRAFT, host, pool, lambda layer: layer))
    assert drafts.bind_registered() == host.size_per_token > 0
    assert drafts.bind_registered() == 0
    slots, host_slots = torch.arange(16, 64), host.alloc(96)[-48:]
    back_up([pool], host, host_slots, slots)
    assert_fetched_as_spliced(splicer, *fetchers, host_slots, slots)


@pytest.mark.feature("HiCache with speculative decoding")
def test_heads_whose_rows_sglang_does_not_keep_on_the_host_are_refused() -> None:
    """Of heads that it does not pack it keeps the first one's."""
    params = SimpleNamespace(mtp_draft_device_pools=(), sidecar_draft_device_pools=(object(),))
    with pytest.raises(UnsupportedError, match=r"draft model of .* a head's rows on the host: SGLang keeps"):
        DraftsOnHost([draft_of(object(), SimpleNamespace(view=SimpleNamespace(windows=None)))], params, None, [])  # type: ignore[arg-type]


@pytest.mark.feature("HiCache with a sparse-attention indexer")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_index_keys_are_read_where_sglang_put_them(layout: str) -> None:
    """As if they had never left the device; a layer that uses another one's index has no keys there either.

    Those of a draft lie behind its target's.
    """
    common: dict[str, Any] = {"size": 320, "page_size": 64, "dtype": torch.bfloat16, "layer_num": LAYERS}
    common |= {"kv_lora_rank": 64, "qk_rope_head_dim": 64, "kv_cache_dim": 128, "enable_memory_saver": False}
    with get_parallel().override(attn_dcp_size=1):
        pool = memory_pool.DSATokenToKVPool(
            **common, device="cpu", index_head_dim=128, skip_topk_layers=[False, True, False]
        )
        draft = memory_pool.DSATokenToKVPool(
            **common | {"layer_num": 1}, device="cpu", index_head_dim=128, skip_topk_layers=[False]
        )
    view, view_of_draft = view_pool(pool), view_pool(draft)
    for pages in (*view.index, *view_of_draft.index):
        keys, scales = split_pages(pages)
        numbers, factors = quantise(torch.randn(keys.shape))
        keys.copy_(numbers.view(torch.uint8))
        scales.copy_(factors)
    anchor: Any = SimpleNamespace(page_size=64, layout=layout, size=384, page_num=6)
    host = DSAIndexerPoolHost(make_dsa_indexer_pool_decl(pool), anchor, packed_draft_device_pools=(draft,))
    host_pages, pages_here = torch.tensor([4, 3]), torch.tensor([1, 2])
    host_slots, slots = ((64 * each[:, None] + torch.arange(64)).flatten() for each in (host_pages, pages_here))
    if layout == "page_first":
        # SGLang has kernels only for this layout.
        for layer, pages in enumerate(host.packed_device_index_buffers):
            host.index_k_with_scale_buffer[host_pages, layer, 0] = pages[pages_here]
    else:
        host.backup_from_device_all_layer(pool, host_slots, slots, "direct")
    rope = RopeParams(inv_freq=10_000.0 ** (-torch.arange(32) / 32), rotary_dim=64, is_neox_style=True)
    form = IndexRope(rope, is_mixed=True)
    forms = {view: (form, None, form), view_of_draft: (form,)}
    rows: Any = SimpleNamespace(layout=layout, page_size=64, size=384, layer_num=LAYERS + 1, target_layer_num=LAYERS)
    rows.kv_buffer = torch.zeros((LAYERS + 1) * 384, 1, 128, dtype=torch.bfloat16)
    part, dst, shifts = slice(5, 105), torch.arange(200, 300), torch.full((100,), 77)
    host_rows = type("MLATokenToKVPoolHost", (), vars(rows))()
    for each, packed_at in ((view, None), (view_of_draft, 0)):
        layers = tuple(range(each.num_layers))
        splicer = Splicer(each, RopeGeometry(layers, (rope,) * len(layers), 2_048, forms[each]))
        fetcher = Fetcher(splicer, view_host_pool(host_rows, each, host, packed_at=packed_at))
        splicer.splice(slots[part], dst, shifts)
        there = [read_keys(pages, dst) for pages in each.index if len(pages)]
        each.fill(dst, 0)
        fetcher.fetch(host_slots[part], dst, shifts)
        for pages, expected in zip((pages for pages in each.index if len(pages)), there, strict=True):
            assert torch.equal(read_keys(pages, dst), expected)
    with pytest.raises(UnsupportedError, match="the host pool NoneType of index keys"):
        view_host_pool(host_rows, view)


@pytest.mark.feature("HiCache with block-sparse attention")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_index_keys_in_rows_are_read_where_sglang_put_them(layout: str, dtype: torch.dtype) -> None:
    """As if they had never left the device; a layer without an indexer has none there either."""
    (pool,), host, (plain,) = pools("mha", 16, layout, torch.bfloat16)
    common: dict[str, Any] = {"size": 128, "page_size": 16, "dtype": dtype, "head_num": 1, "head_dim": 64}
    keys = memory_pool.MHATokenToKOnlyPool(**common, layer_num=2, device="cpu", enable_memory_saver=False)
    for buffer in keys.k_buffer:
        buffer.copy_(torch.randn(buffer.shape).to(dtype).view(buffer.dtype))
    host_keys = MHATokenToKOnlyPoolHost(keys, host, layout)
    rows = [buffer.view(dtype) for buffer in keys.k_buffer]
    view = dataclasses.replace(view_pool(pool), index_rows=(rows[0], None, rows[1]))
    splicer = Splicer(view, plain.geometry)
    fetcher = Fetcher(splicer, view_host_pool(host, view, host_keys))
    slots, host_slots = torch.arange(16, 64), host.alloc(96)[-48:]
    back_up([pool], host, host_slots, slots)
    if layout == "page_first":
        for row, buffer in zip(host_keys.k_data_refs, keys.k_buffer, strict=True):
            row.view(torch.uint8)[host_slots] = buffer.view(torch.uint8)[slots]
    else:
        host_keys.backup_from_device_all_layer(keys, host_slots, slots, "direct")
    dst, shifts = torch.arange(64, 100), torch.full((36,), 77)
    splicer.splice(slots[5:41], dst, shifts)
    there = [buffer[dst].clone() for buffer in keys.k_buffer]
    assert_fetched_as_spliced(splicer, fetcher, host_slots, slots)
    for buffer, expected in zip(keys.k_buffer, there, strict=True):
        assert torch.equal(buffer[dst].view(torch.uint8), expected.view(torch.uint8))
    with pytest.raises(UnsupportedError, match="the host pool NoneType of index keys"):
        view_host_pool(host, view)


@pytest.mark.feature("HiCache with sliding windows in a pool of their own")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_windows_are_read_from_their_own_host_pool(layout: str) -> None:
    """As if they had never left the device, also where the other rows never did; keys are wider in one of the pools."""
    form: dict[str, Any] = {"size": 128, "size_swa": 96, "page_size": 16, "dtype": torch.bfloat16, "head_num": 1}
    form |= {"head_dim": 128, "swa_head_num": 2, "swa_head_dim": 64, "swa_v_head_dim": 64, "enable_memory_saver": False}
    layers = {"swa_attention_layer_ids": [0, 2], "full_attention_layer_ids": [1]}
    pool = SWAKVPool(**form, **layers, device="cpu")
    table, whole, window = torch.zeros(128 + 16, dtype=torch.int64), pool.full_kv_pool, pool.swa_kv_pool
    pool.register_mapping(table)
    for buffer in chain(buffers_of(whole), buffers_of(window)):
        buffer.copy_(torch.randn(buffer.shape))
    common: dict[str, Any] = {"pin_memory": False, "device_capacity_tokens": 128}
    hosts = [
        MHATokenToKVPoolHost(
            each.get_device_pool_infos()[0].buffer_info, 3.0, 0, 16, layout, **common, start_layer=0, end_layer=last
        )
        for each, last in ((whole, 0), (window, 1))
    ]
    rope = RopeParams(inv_freq=10_000.0 ** (-torch.arange(32) / 32), rotary_dim=64, is_neox_style=True)
    view = view_pool(pool)
    splicer = Splicer(view, RopeGeometry(tuple(range(LAYERS)), (rope,) * LAYERS, 2_048))
    fetcher = Fetcher(splicer, view_window_host_pools(*hosts, view))
    slots, dst, shifts = torch.arange(16, 48), torch.arange(64, 96), torch.full((32,), 77)
    table[slots], table[dst] = slots + 48, dst - 48
    host_slots, host_windows = hosts[0].alloc(96)[-32:], hosts[1].alloc(64)[-32:]
    back_up([whole], hosts[0], host_slots, slots)
    back_up([window], hosts[1], host_windows, table[slots])
    splicer.splice(slots, dst, shifts)
    expected = [buffer[at].clone() for buffer, at in view.places(dst)]
    for longer in ((slots[:5], dst, shifts), (slots, dst, torch.full((40,), 77)), (slots, dst, shifts, table[:40])):
        with pytest.raises(ValueError, match="must"):
            splicer.splice(*longer)
    for num_split in (0, 12, 32):
        view.fill(dst, 0)
        # The first half of what is not fetched as a whole has window rows on the device.
        here = num_split // 2
        splicer.splice(slots[:num_split], dst[:num_split], shifts[:num_split], table[slots[:here]])
        fetcher.fetch(host_slots[num_split:], dst[here:], shifts[here:], host_windows[here:])
        for (buffer, at), rows in zip(view.places(dst), expected, strict=True):
            assert torch.equal(buffer[at], rows)


@pytest.mark.feature("images with a store of HiCache or PD disaggregation")
def test_no_store_is_attached_where_the_plugin_has_no_tier_for_it() -> None:
    """SGLang asks the tree, and passes the reason on to whoever wanted it."""
    tree: Any = HiCacheTree.__new__(HiCacheTree)
    tree._storage_attachment, tree.features = None, Features()
    assert tree.attach_storage_backend(storage_backend="file") == (False, NO_STORE)
    tree.features.append(HiCacheStore.__new__(HiCacheStore))
    assert tree.attach_storage_backend(storage_backend="file")[1].startswith("HiCache is not initialized")


def tree_of(queue: deque[Any], *paths: tuple[int, ...]) -> Any:
    """A tree of nodes of 10 tokens, each path by its nodes."""

    def collect(ends: list[int]) -> Any:
        path = next(path[: path.index(ends[0]) + 1] for path in paths if ends[0] in path)
        return (tuple(SimpleNamespace(node_id=n, path_start=10 * i, path_end=10 * i + 10) for i, n in enumerate(path)),)

    return SimpleNamespace(
        cache_controller=SimpleNamespace(ack_load_queue=queue), tree_core=SimpleNamespace(collect_path_info=collect)
    )


def donor_at(node: int, start: int, end: int) -> Piece:
    """A piece whose rows are `[start, end)` of the path to a node."""
    (run,) = plan(0, 60, (start, end, 0)).runs
    return Piece(run, start, end, 0, torch.arange(start, end), node=node)


FETCHED = ("fetched", "fetched the draft's")


def test_a_splice_waits_for_loads_and_keeps_the_hosts_rows_until_they_are_read() -> None:
    """A load is waited for before the rows of its slots are read; the locks end when the queue has let the pass go."""
    seen: list[str] = []
    queue: deque[Any] = deque([SimpleNamespace(finish_event="loaded", node_ids=[2], num_tokens=10)])
    fetcher, of_draft = (SimpleNamespace(fetch=lambda *_, what=what: seen.append(what)) for what in FETCHED)
    tier = HostTier(tree_of(queue, (1, 2)), token_bytes=8, fetchers=[fetcher, of_draft])  # type: ignore[list-item]
    view, splice = SimpleNamespace(device=torch.device("cpu")), lambda *_: seen.append("spliced")
    splicer: Any = SimpleNamespace(view=view, splice=splice)
    draft: Any = SimpleNamespace(splice=lambda *_: None)
    path, locks = make_path(splicer, draft), ExitStack()
    locks.callback(seen.append, "unlocked")
    moved: Any = Splice(None, None, None)  # type: ignore[arg-type]
    reads = HostReads(moved, tier=tier, donors=[donor_at(2, 5, 15)])
    with pytest.MonkeyPatch.context() as patch:
        stream = SimpleNamespace(wait_event=seen.append)
        patch.setattr(torch.cpu, "current_stream", lambda: stream)
        path.move_rows(SimpleNamespace(reads=reads, locks=ExitStack()))  # type: ignore[arg-type]
    assert seen == ["loaded", "spliced"]
    seen.clear()
    fetch: Any = SimpleNamespace(src=None, dst=range(5), shifts=None, windows=None)
    queue.clear()
    reads = HostReads(moved, fetch, tier=tier, donors=[])
    path.move_rows(SimpleNamespace(reads=reads, locks=locks))  # type: ignore[arg-type]
    tier.unlock_read()
    assert seen == ["spliced", *FETCHED]
    (ack,) = queue
    assert (ack.num_tokens, ack.num_bytes, ack.node_ids, ack.finish_event.query()) == (5, 40, [], True)
    queue.clear()
    tier.unlock_read()
    assert seen[3:] == ["unlocked"]


@pytest.mark.parametrize(
    ("donor", "waits"),
    [((3, 0, 10), ""), ((4, 5, 11), "b"), ((4, 20, 30), ""), ((3, 15, 30), "ab"), ((3, 20, 21), "a")],
)
def test_a_splice_waits_for_no_load_but_its_donors(donor: tuple[int, int, int], waits: str) -> None:
    """One load writes node 3, one node 2; what a pass reads from the host is no load."""
    loads = (("a", [3], 10), ("own", [], 30), ("b", [2], 10))
    queue = deque(SimpleNamespace(finish_event=name, node_ids=nodes, num_tokens=n) for name, nodes, n in loads)
    seen: list[str] = []
    tier = HostTier(tree_of(queue, (1, 2, 3), (1, 2, 4)), token_bytes=8)
    tier.wait_for_loads(SimpleNamespace(wait_event=seen.append), [donor_at(*donor)])
    assert "".join(seen) == waits


@pytest.mark.parametrize(("donor", "waits"), [((3, 0, 10), False), ((3, 10, 11), True), ((4, 0, 30), False)])
def test_a_load_of_window_rows_is_of_the_last_window(donor: tuple[int, int, int], waits: bool) -> None:
    """It may load no other rows at all; its window begins in node 2."""
    queue: deque[Any] = deque([SimpleNamespace(finish_event="loaded", node_ids=[3], num_tokens=0)])
    seen: list[str] = []
    tier = HostTier(tree_of(queue, (1, 2, 3), (1, 4, 5)), token_bytes=8, window=12)
    tier.wait_for_loads(SimpleNamespace(wait_event=seen.append), [donor_at(*donor)])
    assert bool(seen) is waits


def test_a_run_is_read_from_the_device_as_far_as_it_is_there() -> None:
    """Also if the plan was clipped since: what is left of the second run is on the device as a whole."""
    made, tier, locks = plan(0, 60, (10, 20, 4), (30, 42, 4)), HostTier(None, token_bytes=8), ExitStack()  # type: ignore[arg-type]
    found = Found(1, 16, torch.arange(100, 107)), Found(1, 38, torch.arange(200, 204))
    first = tier.pieces(found[0], made.runs[0], 4, torch.arange(9), locks)
    last = tier.pieces(found[1], made.runs[1], 4, torch.arange(34), locks)
    pending = PendingSplice(made, [*first, *last])
    assert [tier.num_to_fetch(each, 6, 16) for each in found] == [7, 0]

    def read(place: Place) -> list[Any]:
        found = [piece for piece in pending.pieces if piece.place is place]
        return [(piece.start, piece.end, piece.shift, piece.slots.tolist()) for piece in found]

    assert read(Place.DEVICE) == [(10, 13, 4, [6, 7, 8]), (30, 38, 4, [*range(26, 34)])]
    assert read(Place.HOST) == [(13, 20, 4, [*range(100, 107)]), (38, 42, 4, [*range(200, 204)])]
    ordered = sorted(pending.pieces, key=lambda piece: piece.place)
    reads = tier.gather([(piece, torch.arange(piece.start, piece.end)) for piece in ordered], torch.arange(22))
    assert [(each.node, each.start, each.end) for each in reads.donors] == [(1, 10, 13), (1, 30, 38)]
    assert reads.splice.src.tolist() == [6, 7, 8, *range(26, 34)]
    assert reads.splice.dst.tolist() == [10, 11, 12, *range(30, 38)]
    assert reads.fetch is not None
    assert reads.fetch.src.tolist() == [*range(100, 107), *range(200, 204)]
    assert reads.fetch.dst.tolist() == [*range(13, 20), *range(38, 42)]
    assert (reads.splice.shifts.tolist(), reads.fetch.shifts.tolist()) == ([*range(11)], [*range(11, 22)])
    pending.clip(36)
    assert read(Place.DEVICE)[1:] == [(30, 35, 4, [*range(26, 31)])]
    assert pending.num_fetched == 7


def test_a_run_is_cut_where_its_window_rows_lie_elsewhere() -> None:
    """Of ten tokens six are on the device, of which the third and fourth have their window rows on the host."""
    there = [WindowsOnHost(8, 10, torch.arange(72, 74)), WindowsOnHost(12, 16, torch.arange(76, 80))]
    made, found = plan(0, 60, (10, 20, 4)), Found(2, 16, torch.arange(100, 104), windows=there)
    tree, locked = tree_of(deque(), (1, 2)), list[int]()
    tree.supports_swa, tree.swa_retain_window, tree.lock, tree.unlock = lambda: True, 4, locked.append, None
    tier = WindowTier(tree, torch.arange(44, 60), HostTier(tree, token_bytes=8))
    pending = PendingSplice(made, tier.pieces(found, made.runs[0], 4, torch.arange(12), ExitStack()))
    assert locked == [1, 2], "the nodes whose window rows are on the device"

    def read() -> list[tuple[int, Place, list[int], list[int]]]:
        every = [(each, each.windows) for each in pending.pieces]
        return [(each.start, each.place, each.slots.tolist(), own.tolist()) for each, own in every if own is not None]

    first = [(10, Place.DEVICE, [6, 7], [50, 51]), (12, Place.WINDOWS_ON_HOST, [8, 9], [72, 73])]
    last = (16, Place.HOST, [100, 101, 102, 103], [76, 77, 78, 79])
    assert read() == [*first, (14, Place.DEVICE, [10, 11], [54, 55]), last]
    assert pending.num_fetched == 6
    ordered = sorted(pending.pieces, key=lambda piece: piece.place)
    reads = tier.gather([(piece, torch.arange(piece.start, piece.end)) for piece in ordered], torch.arange(10))
    assert (reads.splice.src.tolist(), reads.splice.dst.tolist()) == ([6, 7, 10, 11, 8, 9], [10, 11, 14, 15, 12, 13])
    assert reads.splice.windows is not None
    assert reads.splice.windows.tolist() == [50, 51, 54, 55]
    assert reads.fetch is not None
    assert reads.fetch.windows is not None
    assert (reads.fetch.src.tolist(), reads.fetch.dst.tolist()) == ([100, 101, 102, 103], [12, 13, *range(16, 20)])
    assert (reads.fetch.windows.tolist(), reads.fetch.shifts.tolist()) == ([72, 73, *range(76, 80)], [*range(4, 10)])
    pending.clip(14)
    assert read() == [first[0], (12, Place.WINDOWS_ON_HOST, [8], [72])]
    assert pending.num_fetched == 1
