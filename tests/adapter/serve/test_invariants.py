"""Invariants that need SGLang's tree but no server; `tests/mutations/table.toml` says which code keeps them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import base_prefix_cache as base
from sglang.srt.mem_cache.base_prefix_cache import InsertResult
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_hash_str

from sglang_pic.adapter.serve.account import FALLBACKS, Accounting
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.rows import Reads, Splice
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.adapter.serve.tree import adopted_again
from sglang_pic.core import DropReason, Plan
from tests.helpers.builders import Kept, make_path, request, request_state
from tests.helpers.rank_driver import NO_DRAFT, POOL, Draft, Host, Rank, drive
from tests.helpers.traffic import BREAK, FIRST_WORD, NUM_WORDS


def words(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST_WORD, FIRST_WORD + NUM_WORDS), k=length)


# Most of it is far from a prompt's end.
TEXT = words(4, 700)
HEADS = [[*range(FIRST_WORD + 10 * number, FIRST_WORD + 10 * number + 40), BREAK] for number in range(4)]
each_page_size = pytest.mark.parametrize("page_size", [1, 16])
each_draft = pytest.mark.parametrize(
    "draft", [NO_DRAFT, Draft(), Draft(is_eagle=True)], ids=["no", "standalone", "eagle"]
)

_READ, _FETCHED = ("rows read", "donor_evicted", "inherited"), ("rows fetched",)
# What a rank has, and what has to happen in its run.
SOURCES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "device": ({}, _READ),
    "device-draft": ({"draft": Draft()}, _READ),
    "device-eagle": ({"draft": Draft(is_eagle=True)}, _READ),
    "windows": ({"num_windows": POOL}, ("rows read", "windows left")),
    "few-windows": ({"num_windows": POOL // 2}, ("rows read", "windows left")),
    "host": ({"host": Host(3_072)}, _FETCHED),
    "host-selective": ({"host": Host(2_048, "write_through_selective")}, _FETCHED),
    "host-back": ({"host": Host(4_096, "write_back")}, _FETCHED),
    "host-large": ({"host": Host(24_576)}, (*_FETCHED, "loaded back")),
    "host-few-windows": ({"host": Host(4_096), "num_windows": POOL // 2}, (*_FETCHED, "rows split")),
    "host-back-few-windows": (
        {"host": Host(6_144, "write_back"), "num_windows": POOL // 2},
        (*_FETCHED, "rows split", "planned again"),
    ),
    "host-large-windows": ({"host": Host(24_576), "num_windows": POOL}, _FETCHED),
    "few-windows-eagle": ({"draft": Draft(is_eagle=True), "num_windows": POOL // 2}, ("rows read", "windows left")),
}
# With every commit each of them at one page size, and each page size with every kind of source. It takes more steps
# until so many rows are read from the host that one which was given back too early is written over.
_RUNS = [
    pytest.param(
        name,
        page_size,
        1200 if "host" in has or (number + at) % 2 else 600,
        id=f"{name}-{page_size}",
        marks=[pytest.mark.slow] if (number + at) % 2 else [],
    )
    for number, (name, (has, _)) in enumerate(SOURCES.items())
    for at, page_size in enumerate((1, 16))
]


@pytest.mark.parametrize(("source", "page_size", "num_steps"), _RUNS)
def test_every_row_that_is_read_is_the_right_one(source: str, page_size: int, num_steps: int) -> None:
    """Over a random run with evictions, aborts, pins, lanes, namespaces and flushes; the checks are the run's own.

    A draft model's row depends on the token behind it, too, and trees for EAGLE name rows by both. Windows may have a
    pool of their own, short of slots. With HiCache rows leave the device for the host, are loaded back, and fetched.
    """
    has, happens = SOURCES[source]
    rank = Rank(page_size, shuffle=1, **has)
    drive(rank, num_steps, 5, lambda *_: None)
    assert all(rank.counts[what] for what in happens), rank.counts
    # Of windows on the host the last one may be of another pass than the rows.
    assert rank.counts["taken for approximate"] == 0 or ("host" in has and "num_windows" not in has)
    rank.settle()


# A page is a file, so those of one token take longest.
_STORES = {"page1": (1, NO_DRAFT, False, 25), "page16": (16, NO_DRAFT, False, 80)}
_STORES["page16-eagle"] = (16, Draft(is_eagle=True), True, 80)


@pytest.mark.parametrize(
    ("page_size", "draft", "has_side_pool", "num_steps"),
    [
        *(pytest.param(*store, id=name) for name, store in _STORES.items()),
        *(pytest.param(*has, 250, id=f"{name}-long", marks=pytest.mark.slow) for name, (*has, _) in _STORES.items()),
    ],
)
def test_every_row_that_comes_from_a_store_is_the_right_one(
    page_size: int, draft: Draft, has_side_pool: bool, num_steps: int, tmp_path: Path
) -> None:
    """Servers share a store, and load prefixes from there: also rows of the pool beside that of the rows."""
    for number in range(2):
        rank = Rank(page_size, shuffle=number, draft=draft, host=Host(store=tmp_path, has_side_pool=has_side_pool))
        drive(rank, num_steps, 5, lambda *_: None)
        assert number == 0 or rank.counts["prefix stored"]
        rank.settle()


@pytest.mark.parametrize(("page_size", "has_side_pool"), [(1, False), (16, False), (16, True)])
def test_spliced_rows_reach_other_servers_under_keys_of_their_own(
    page_size: int, has_side_pool: bool, tmp_path: Path
) -> None:
    """They are a prefix of requests that may be spliced; whoever opted out finds what is exact."""
    first, moved = [*HEADS[0], *TEXT], [*HEADS[1], *TEXT, BREAK, *words(9, 40)]
    host = Host(store=tmp_path, has_side_pool=has_side_pool)
    rank = Rank(page_size, shuffle=0, host=host)
    serve(rank, first)
    assert serve(rank, moved) > 300
    rank.settle()
    store = rank.tree.cache_controller.storage_backend
    pages = [get_hash_str(each, page_size=page_size) for each in (first, moved)]
    for pool in ("", ".indexer") if has_side_pool else ("",):
        found = [page_size * store.batch_exists([page + pool for page in each]) for each in pages]
        assert found[0] > 700, "what a stock server would find"
        assert found[1] < 64
    other = Rank(page_size, shuffle=1, host=host)
    for options, least, most in (({"mode": "off"}, 0, 0), ({}, 700, 784)):
        before = other.counts["prefix stored"]
        other.start([*moved, *words(10, 20)], options, 0)
        assert (other.running[-1].pic.prefix.approximate_len > 600) == (least > 0)
        other.end(other.running[-1], checkpointed=True)
        assert least <= other.counts["prefix stored"] - before <= most
    # Of what came only rows that were computed at their places may serve elsewhere: the run's own checks look.
    serve(other, [*words(12, 200), *TEXT, BREAK, *words(9, 40), *words(11, 100)])
    other.settle()


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "approximate"])
@pytest.mark.parametrize("when", ["during", "before"])
def test_rows_of_a_store_are_no_donors_where_it_or_others_spliced(when: str, is_exact: bool, tmp_path: Path) -> None:
    """Another request brings the rows of a path, computed or spliced, during its load or long before: then only the
    index knows them. With this policy the tree keeps them on the device beside the store's; the run's own checks look.
    """
    prompt, donor = [*HEADS[1], *TEXT, BREAK, *words(9, 40)], [*HEADS[0], *TEXT]
    first = Rank(16, shuffle=0, host=Host(store=tmp_path))
    for tokens in (prompt,) if is_exact else (donor, prompt):
        serve(first, tokens)
    first.settle()
    rank = Rank(16, shuffle=1, host=Host(3 * POOL, "write_through_selective", tmp_path))
    check, has_store = rank.tree.check_prefetch_progress, rank._has_store

    def bring(*handle: Any) -> Any:
        rank.tree.check_prefetch_progress, rank._has_store = check, lambda: False
        for tokens in (donor, prompt) if is_exact else (prompt,):
            serve(rank, tokens)
        rank._has_store = has_store
        return check(*handle) if handle else None

    if when == "before":
        bring()
        rank.check_events()
        evict_from_tree_cache(rank.tree, POOL)
        rank.tree.evict_host(rank.host_pool.size)
    else:
        rank.tree.check_prefetch_progress = bring
    rank.start([*prompt, *words(10, 20)], {}, 0)
    assert rank.counts["prefix stored"] > 700
    rank.end(rank.running[-1], checkpointed=False)
    for is_loaded in (True, False):
        rank.loads = is_loaded
        serve(rank, [*HEADS[2], *TEXT, *words(11, 100)])
        evict_from_tree_cache(rank.tree, POOL)
    rank.settle()


@pytest.mark.parametrize("draft", [NO_DRAFT, Draft(is_eagle=True)], ids=["no", "eagle"])
def test_a_path_that_is_written_to_a_store_has_its_own_tokens(draft: Draft, tmp_path: Path) -> None:
    """Also where paths part: for EAGLE both of two neighbours have the token between them."""
    rank = Rank(16, shuffle=0, draft=draft, host=Host(store=tmp_path))
    for tokens in ([*TEXT[:400], *words(5, 100)], TEXT):
        serve(rank, tokens)
    rank.check_events()
    found = rank.tree.match_prefix(base.MatchPrefixParams(key=RadixKey(array("q", TEXT))))
    path = rank.tree.host.path_to(found.last_device_node)
    assert 0 < path.start < path.num_rows == 16 * len(path.pages) == 688
    assert path.tokens.tolist() == TEXT[: 688 + draft.is_eagle]
    rank.settle()


def test_rows_that_come_back_to_the_device_by_a_splice_are_no_donors() -> None:
    """Nothing was loaded back, so the tree takes the request's rows in the place of those that it has on the host."""
    rank = Rank(1, shuffle=0, host=Host())
    serve(rank, [*HEADS[0], *TEXT])
    rank.check_events()
    evict_from_tree_cache(rank.tree, POOL)
    rank.loads = False
    serve(rank, [*HEADS[0], *TEXT])
    assert rank.counts["rows fetched"] > 700
    assert rank.counts["adopted again"] == 741
    assert serve(rank, [*HEADS[1], *TEXT]) == 0, "the run's own checks look at the rows"
    rank.settle()
    # Rows that were locked stay, and get the window rows of an insertion: up to where it found rows in the tree.
    taken = {ComponentType.SWA: [(16, 48), (80, 320)], ComponentType.FULL: [(80, 96), (256, 320)]}
    assert adopted_again(InsertResult(prefix_len=256, adopted_ranges=taken)) == [(16, 48), (80, 256)]


def test_donors_beside_a_load_that_has_not_ended_are_found_on_the_host() -> None:
    """SGLang loads no window that has a node of another load that is under way; a splice takes nothing from it."""
    rank = Rank(1, shuffle=0, host=Host(write_policy="write_back"), num_windows=POOL)
    one, other = ([*TEXT[:300], *words(5 + number, length)] for number, length in enumerate((300, 40)))
    for tokens in (one, other):
        serve(rank, tokens)
    evict_from_tree_cache(rank.tree, POOL)
    rank.check_events()
    rank.index.settle()
    known = rank.index.num_tokens
    rank.start([*one, *words(7, 40)], {}, 0)
    assert rank.counts["loaded back"] == 600
    rank.start([*words(8, 320), *other, *words(9, 60)], {}, 0)
    assert rank.tree.ongoing_load_back
    rank.forward(rank.running[-1])
    assert rank.counts["rows read"] + rank.counts["rows fetched"] == 340 - 2 * 8, "all but sink and seam"
    rank.index.settle()
    assert rank.index.num_tokens == known, "what is there is not forgotten"
    rank.settle()


def test_the_store_gets_rows_that_any_server_would_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys are of text alone, so a stock server finds what is written: no splice, and nothing behind one."""
    written: list[int] = []
    monkeypatch.setattr(UnifiedRadixCache, "write_backup_storage", lambda _, node: written.append(node))
    rank = Rank(16, shuffle=0, host=Host())
    rank.tree.enable_storage = True
    for head, ending, is_written in ((0, 0, True), (1, 0, False), (1, 40, False), (2, 80, True)):
        written.clear()
        options = {"mode": "off"} if ending == 80 else {}
        rank.start([*HEADS[head], *TEXT, *words(7, ending)], options, 0)
        rank.end(rank.running[-1], checkpointed=True)
        rank.tree.flush_pending_backups()
        rank.tree.writing_check()
        assert bool(written) == is_written, (head, ending)
    assert rank.counts["rows read"] > 300
    assert not rank.faults.report().by_reason


@each_page_size
@each_draft
def test_with_a_draft_a_run_gives_its_last_token_and_no_more(draft: Draft, page_size: int) -> None:
    rank = Rank(page_size, shuffle=0, draft=draft)
    # Too long to be values of a field, and to leave the run near the prompt's end.
    others = [words(number, 320) for number in range(3)]
    whole = len(TEXT) - len(TEXT) % 16
    # With a token more: in a tree for EAGLE the last token of a path has no row.
    serve(rank, [*others[0], *TEXT[: whole + 1]])
    spliced = serve(rank, [*others[1], *TEXT[:whole], *others[2]])
    # The first 8 tokens repair the seam, and behind the last one stands another token here.
    assert spliced == whole - 8 - draft.lookahead
    assert rank.counts["donor_evicted"] == 0
    rank.index.settle()
    assert rank.index.num_tokens >= 2 * whole, "what is there is not forgotten"


@pytest.mark.parametrize("draft", [NO_DRAFT, Draft(is_eagle=True)], ids=["no", "eagle"])
def test_of_a_page_that_two_paths_begin_alike_the_spliced_rows_are_no_donors(draft: Draft) -> None:
    """Each path has rows of its own for the page in which they part; those of the second were computed."""
    rank = Rank(16, shuffle=0, draft=draft)
    texts = [words(10 + number, 320) for number in range(6)]
    heads, ends = texts[:3], texts[3:5]
    shared = [*heads[1], *TEXT[:271]]
    assert len(shared) % 16 == 15
    serve(rank, [*heads[0], *TEXT])
    assert serve(rank, [*shared, *ends[0]]) > 200, "up to where the paths part"
    assert serve(rank, [*shared, *ends[1]]) == 0
    assert serve(rank, [*heads[2], *shared[-15:], *ends[0], *texts[5]]) > 200, "the run's own checks look at the rows"
    rank.settle()


@each_page_size
def test_with_a_tree_for_eagle_a_prompt_can_be_pinned(page_size: int) -> None:
    """The last token of a prompt has a row that the tree names by the answer's first one: it is not held."""
    rank = Rank(page_size, shuffle=0, draft=Draft(is_eagle=True))
    rank.start(TEXT, {"pin": "skill"}, 0)
    rank.end(rank.running[-1], checkpointed=True)
    assert [pin.tokens for pin in rank.pins.report().held] == [699 - 699 % page_size]
    rank.settle()


def serve(rank: Rank, tokens: list[int], **fields: Any) -> int:
    """Serve a request to its end; how many rows were spliced."""
    before = rank.counts["rows read"]
    rank.start(tokens, {}, 0, **fields)
    rank.end(rank.running[-1], checkpointed=True)
    return rank.counts["rows read"] - before


@pytest.mark.parametrize("other", [{"cache_salt": "s"}, {"extra_key": "k"}])
def test_neither_a_salt_nor_a_key_is_crossed(other: dict[str, str]) -> None:
    rank = Rank(1, shuffle=0)
    assert serve(rank, [*HEADS[0], *TEXT]) == 0
    assert serve(rank, [*HEADS[1], *TEXT], **other) == 0
    assert serve(rank, [*HEADS[2], *TEXT], **other) > 100, "its own rows serve it"
    assert serve(rank, [*HEADS[3], *TEXT]) > 100


def test_no_row_that_came_from_a_splice_reaches_a_request_that_opted_out() -> None:
    rank = Rank(1, shuffle=0)
    serve(rank, [*HEADS[0], *TEXT])
    assert serve(rank, [*HEADS[1], *TEXT]) > 100
    for num_shared in (0, 741):
        # The run's own checks look at the rows of the exact match, too.
        rank.start([*HEADS[1], *TEXT, 5], {"mode": "off"}, 0)
        assert rank.running[-1].pic.prefix == (num_shared, 0, 0), "all of them exact"
        rank.end(rank.running[-1], checkpointed=True)


@pytest.mark.parametrize("forget", [Rank.flush, lambda rank: rank.tree.change_weights()], ids=["flush", "weights"])
def test_a_flush_and_new_weights_forget_all_donors(forget: Callable[[Rank], None]) -> None:
    rank = Rank(1, shuffle=0)
    serve(rank, TEXT)
    rank.index.settle()
    assert rank.index.size.num_donors > 0
    forget(rank)
    rank.index.settle()
    assert rank.index.size.num_donors == rank.index.num_tokens == 0


def test_rows_that_the_tree_did_not_adopt_make_no_donors() -> None:
    """Of two requests with one prompt side by side the second brings nothing: its rows are freed as duplicates."""
    rank = Rank(1, shuffle=0)
    published: list[Any] = []
    keep = rank.index.note

    def note(namespace: Any, tokens: Any, rows: Any, delimiters: Any) -> None:
        published.append((len(tokens), rows.computed))
        keep(namespace, tokens, rows, delimiters)

    rank.index.note = note  # type: ignore[method-assign]
    for tokens in (TEXT, [*TEXT, *TEXT[:40]]):
        rank.start(tokens, {}, 0)
    for req in list(rank.running):
        rank.end(req, checkpointed=True)
    assert published == [(700, [(0, 700)]), (740, [(700, 740)])]


def test_rows_behind_splices_are_not_exact_where_the_tree_has_computed_ones_in_their_place() -> None:
    """Two requests run side by side. The first to end had no donor; the other one was spliced, and goes on."""
    rank = Rank(1, shuffle=0)
    prompt = [*HEADS[1], *TEXT]
    rank.start(prompt, {}, 0)
    serve(rank, [*HEADS[0], *TEXT])
    rank.start([*prompt, *words(7, 40)], {}, 0)
    for req in list(rank.running):
        rank.end(req, checkpointed=True)
    assert rank.counts["rows read"] > 300
    rank.start([*prompt, *words(7, 60)], {}, 0)
    assert rank.running[-1].pic.prefix == (741, 0, 40), "the run's own checks look at the rows"


def test_what_a_plan_leaves_out_is_counted_by_its_reason() -> None:
    counted = Kept()
    state = request_state(dropped={DropReason.DONOR_EVICTED: 2})
    state.pending = PendingSplice(Plan(prefix_len=0, end=9), [])
    state.drop_plan(Fallback.MEMORY)
    Accounting(counted).count_admitted(request(range(9), pic=state), None, Fallback.SESSION, first_chunk=True)
    assert counted.by_label(FALLBACKS) == {"donor_evicted": 2, "memory": 1, "session": 1}


@pytest.mark.parametrize("fails", [False, True])
def test_donors_stay_locked_until_their_copy_is_queued(fails: bool) -> None:
    locks, seen = ExitStack(), list[str]()
    locks.callback(seen.append, "unlocked")

    def splice(*_: torch.Tensor) -> None:
        seen.append("copied")
        if fails:
            raise RuntimeError("no copy")

    moved: Any = Splice(None, None, None)  # type: ignore[arg-type]
    gap: Any = SimpleNamespace(reads=Reads(moved), locks=locks)
    path = make_path(SimpleNamespace(splice=splice))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no copy") if fails else nullcontext():
        path.move_rows(gap)
    assert seen == ["copied", "unlocked"]
