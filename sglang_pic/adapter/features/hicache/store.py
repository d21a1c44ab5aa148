"""Text that other servers computed, found in the store that HiCache shares with them, wherever it stands.

SGLang's store gives a server the rows of a path whose tokens it knows. `core/directory.py` says which paths hold the
text of a prompt; their rows are loaded by SGLang's own prefetch, into its own tree, and are donors on the host then,
like any other.

    arrival         look up what of the prompt no donor here has, on a thread beside the scheduler's
    every round     have SGLang load what was found; publish what came
    admission       the request waits for both, at most as long as computing the text would take
    every backup    list the path, if SGLang wrote rows of it that were computed behind computed ones, on another thread

Rows that came from a splice, and those behind them, are written under keys of the plugin's own: a prefix for servers
with the same model and policy, and for nobody else. SGLang writes the pages of side pools (index keys of sparse
attention, rows of a draft) under the keys of the rows, whichever they are. A page is found only if the store has it of
every pool under one key, and its checksum is of all of them.

Ranks may take what they find only if all of them found the same, and at the same round: they agree on counts, as SGLang
does for its own loads. A store that is slow, gone or full, or holds something else, costs reuse: our objects are read
and written on threads of our own, for which neither the scheduler nor SGLang's threads wait.
"""

from __future__ import annotations

import hashlib
import logging
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any, Final

import msgspec
import numpy as np
import torch
import xxhash

from sglang_pic.adapter.features.hicache.host_tier import BackedPath
from sglang_pic.adapter.features.hicache.store_objects import num_stored, objects_of
from sglang_pic.adapter.metrics import Metric, MetricKind, Series
from sglang_pic.adapter.namespace import Namespace, is_shared, is_strict
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Feature, PicTree
from sglang_pic.adapter.serve.planning import Planning, donor_namespaces
from sglang_pic.adapter.serve.publish import Publication
from sglang_pic.adapter.serve.state import LOADED_PATHS, RequestState
from sglang_pic.adapter.sglang.seams import Req, Tree
from sglang_pic.core import LEAST_UNKNOWN, Directory, Found, Objects, Sums, Tokens, as_tokens

logger = logging.getLogger(__name__)

LOOKUPS: Final = Metric(
    "sglang:pic_store_lookups_total",
    MetricKind.COUNTER,
    "Prompts with text that no donor here has, which was looked up in HiCache's store, by what became of it.",
    label="outcome",
    values={
        "found": "Paths that hold it were found.",
        "nothing": "None was, or the store failed.",
        "late": "It took longer than the request may wait; what comes later serves other requests.",
        "apart": "Ranks found different paths, and took none.",
    },
)
LOADED: Final = Metric(
    "sglang:pic_store_loaded_tokens_total", MetricKind.COUNTER, "Tokens whose rows such look-ups brought to the host."
)
REFUSED: Final = Metric(
    "sglang:pic_store_refused_pages_total",
    MetricKind.COUNTER,
    "Pages from the store whose rows had another checksum than was listed; they were not used.",
)
LISTED: Final = Metric(
    "sglang:pic_store_listed_tokens_total", MetricKind.COUNTER, "Tokens whose rows are listed for other servers."
)
METRICS: Final = (LOOKUPS, LOADED, REFUSED, LISTED)

_MAX_LOOKUPS = 64
_MAX_LISTINGS = 64
"""Paths that wait to be listed; where the store is slower, further ones are not."""
_LOOKED_UP: Final = "looked up"
# How much a measured load counts in the mean time of a token.
_FRESH = 0.25


@dataclass(slots=True, eq=False)
class _Lookup:
    """A request whose text is looked up, then loaded."""

    handle: Any
    state: RequestState
    namespace: Namespace
    found: Future[list[Found]]
    deadline: float
    loads: set[Any] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Load:
    """A path that SGLang loads for a look-up, from `start` on."""

    lookup: _Lookup
    tokens: Tokens
    start: int
    sums: Sums
    started_at: float


@dataclass(slots=True, eq=False)
class Write:
    """What SGLang was told to write: a node of the tree, known by its last page."""

    last_page: str
    num_own: int = 0
    """Pages at its end that are spliced, or stand behind splices: their keys are our own."""
    path: BackedPath | None = None
    """The path to it, where something is to be listed: what ends at `end`, from the block on that begins at `start`."""
    start: int = 0
    end: int = 0
    sums: Sums | None = None
    """Of the pages between `start` and the node's own."""


@dataclass(slots=True, eq=False)
class _Prefetch:
    """What SGLang looks for in the store: the prefix of a request, or a path of ours."""

    namespace: Namespace
    tokens: Tokens
    start: int
    own: frozenset[str] = frozenset()
    """Pages that are there under keys of our own."""
    num_exact: int = 0
    """Tokens before the first of these, from `start` on; the least over the ranks, once they have agreed."""


class StoreTier(Feature):
    """The store's side of a tree with HiCache.

    Args:
        tree: SGLang's tree, whose controller is attached; a store may be attached to it, or detached, at any time.
        make_directory: makes the directory of a store.
        planning: says which requests may reuse, and what computing costs.
        publication: is told of rows that came.
        series: exports `METRICS`.
        policy: the server's reuse policy; rows that were spliced under another one are not found.
    """

    fault = Fallback.FAULT_STORE

    def __init__(
        self,
        tree: Tree,
        make_directory: Callable[[Objects], Directory],
        *,
        policy: bytes = b"",
        planning: Planning,
        publication: Publication,
        series: Series,
    ) -> None:
        self._tree, self._planning, self._publication = tree, planning, publication
        self._policy = policy
        self._make_directory, self._series = make_directory, series
        self._backend: object = None
        self._directory: Directory | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pic-store")
        self._lister = ThreadPoolExecutor(1, thread_name_prefix="pic-store-list")
        self._listings: deque[Future[None]] = deque()
        self._numbers = count()
        # In the order of arrival, which is the same on all ranks.
        self._looking: deque[_Lookup] = deque()
        self._loading: deque[_Lookup] = deque()
        self._loads: dict[Any, _Load] = {}
        self._late: list[Future[list[Found]]] = []
        """Look-ups for which nobody waits any more; the first of them may go on."""
        self._writes: deque[Write] = deque()
        self._prefetches: dict[Any, _Prefetch] = {}
        self._token_ns = 0
        # Only grow, each by one thread; `_exported` is what the metrics have of them.
        self._num_refused = self._num_listed = 0
        self._exported = Counter[str]()

    # ---- Requests ----

    def look_up(self, req: Req) -> None:
        """Look up what of an arrived request's prompt is new here. Cost of a scan, .1 ms for 32k tokens."""
        state: RequestState = req.pic
        directory = self.directory
        if directory is None or self._is_behind or _LOOKED_UP in state.of_features or req.lora_id is not None:
            return
        state.of_features[_LOOKED_UP] = True
        if state.options.pin is not None or self._planning.refusal(req) is not None:
            return
        namespace, tokens = donor_namespaces(req)[-1], as_tokens(req.full_untruncated_fill_ids)
        if not is_shared(namespace.extra_key):
            return
        start = req.prefix_len + req.host_hit_length
        spans = self._publication.unknown(namespace, tokens, start, LEAST_UNKNOWN)
        if spans:
            num_unknown = sum(end - begin for begin, end in spans)
            found = self._thread.submit(directory.find, _encoded(namespace), tokens, spans)
            deadline = time.monotonic() + self._patience_s(num_unknown)
            self._looking.append(_Lookup(req.cache_request_handle, state, namespace, found, deadline))

    def is_ready(self, handle: Any) -> bool:
        """Whether a request need not wait for the store."""
        waiting = (*self._looking, *self._loading)
        return self._tree.prefetch_stop_policy == "best_effort" or all(each.handle != handle for each in waiting)

    def abandon(self, handle: Any) -> None:
        """A request left: nothing is looked up for it any more; what is being loaded still comes."""
        for lookups in (self._looking, self._loading):
            for lookup in [each for each in lookups if each.handle == handle]:
                lookup.found.cancel()
                lookups.remove(lookup)
        self._prefetches.pop(handle, None)

    def step(self) -> None:
        """Go on with look-ups and loads, after SGLang has gone on with its own; all ranks do so together."""
        self._count()
        if self._looking or self._loading or self._late:
            now = time.monotonic()
            num_done, num_late, num_unloaded, is_there = self._agreed(
                _num_leading(self._looking, lambda each: each.found.done()),
                _num_leading(self._looking, lambda each: each.deadline <= now),
                _num_leading(self._loading, lambda each: each.deadline <= now),
                int(all(found.done() for found in self._late)),
            )
            if is_there:
                self._late.clear()
            done = [self._looking.popleft() for _ in range(num_done)]
            for _ in range(num_late - num_done):
                self._late.append(self._looking.popleft().found)
                self._late[-1].cancel()
                self._series.add(LOOKUPS, value="late")
            for _ in range(num_unloaded):
                self._loading.popleft()
            if done:
                self._take(done)
        for handle in [handle for handle in self._prefetches if not self._tree.has_ongoing_prefetch(handle)]:
            del self._prefetches[handle]
        for handle in [handle for handle in self._loads if not self._tree.has_ongoing_prefetch(handle)]:
            self._finish(handle, self._loads.pop(handle))

    def on_flush(self) -> None:
        for lookup in self._looking:
            lookup.found.cancel()
        for pending in (self._looking, self._loading, self._loads, self._writes, self._prefetches):
            pending.clear()

    # ---- What SGLang's threads call ----

    def check(self, operation: Any, page_hashes: Sequence[str], slots: torch.Tensor, num_pages: int) -> int:
        """How many of the first `num_pages` pages that came from the store have the rows that were listed.

        Args:
            operation: SGLang's; one that is not ours is not looked at.
            page_hashes: a batch of its pages.
            slots: of the host, where they were read to.
            num_pages: how many of them came.
        """
        load = self._loads.get(operation.handle)
        if load is None or not num_pages:
            return num_pages
        page_size = self._tree.page_size
        first = load.start // page_size + operation.hash_value.index(page_hashes[0])
        actual = self._sums(slots[: num_pages * page_size])
        is_listed = (load.sums[:, first : first + num_pages] == actual).any(axis=0)
        num_listed = num_pages if is_listed.all() else int(is_listed.argmin())
        self._num_refused += num_pages - num_listed
        return num_listed

    def take_write(self, operation: Any) -> Write | None:
        """What was announced of a write, which SGLang does in the order in which it was told; None for any other.

        NOTE: what was not announced is not written, because nobody knows which keys its rows may have.
        """
        last_page = operation.hash_value[-1] if operation.hash_value else None
        # A copy: the scheduler's thread announces more meanwhile.
        is_announced = any(write.last_page == last_page for write in self._writes.copy())
        while is_announced and self._writes:
            write = self._writes.popleft()
            # SGLang gave up those before it.
            if write.last_page == last_page:
                return write
        return None

    def keys_to_write(self, operation: Any, write: Write) -> list[str]:
        """The keys of the pages that SGLang is about to write."""
        pages: list[str] = operation.hash_value
        num_exact = len(pages) - write.num_own
        return [*pages[:num_exact], *map(self._own_key, pages[num_exact:])]

    def backed_up(self, operation: Any, write: Write) -> None:
        """SGLang has written what it was told to: have it listed."""
        path, start, page_size, directory = write.path, write.start, self._tree.page_size, self._directory
        if path is None or write.sums is None or directory is None:
            return
        if operation.completed_tokens < len(path.slots) - path.start:
            return
        written = operation.pool_storage_result.extra_pool_hit_pages
        if any(written.get(pool.name, 0) < len(operation.hash_value) for pool in operation.pool_transfers or ()):
            return
        pages = [bytes.fromhex(page) for page in path.pages[max(0, start // page_size - 1) : write.end // page_size]]
        before = pages.pop(0) if start else None
        while self._listings and self._listings[0].done():
            self._listings.popleft()
        if len(self._listings) < _MAX_LISTINGS:
            with _warning_of_unlisted():
                # Now, because SGLang may give the slots to others after this.
                sums = np.concatenate([write.sums, self._sums(operation.host_indices[: write.end - path.start])])
                self._listings.append(self._lister.submit(self._list, directory, path, write, before, pages, sums))

    def _list(
        self,
        directory: Directory,
        path: BackedPath,
        write: Write,
        before: bytes | None,
        pages: Sequence[bytes],
        sums: Sums,
    ) -> None:
        with _warning_of_unlisted():
            directory.list_path(_encoded(path.namespace), path.tokens, write.start, before, pages, sums)
            self._num_listed += write.end - path.start

    def extend_hit(self, operation: Any, pages: list[str], backend: Any) -> list[str]:
        """What the store has of a prefix: `pages` under SGLang's keys, and behind them pages under ours."""
        prefetch = self._prefetches.get(operation.handle)
        if prefetch is None or is_strict(prefetch.namespace.extra_key):
            return pages
        num_found, own = len(pages), set[str]()
        prefetch.num_exact = num_found * self._tree.page_size
        wanted = operation.all_hash_values or []
        while operation.handle not in self._loads and self._directory is not None:
            rest = wanted[num_found:]
            side_pools = operation.pool_transfers or ()
            num_own = num_stored(backend, [*map(self._own_key, rest)], side_pools) if rest else 0
            num_more = num_stored(backend, rest[num_own:], side_pools) if num_own and rest[num_own:] else 0
            own.update(rest[:num_own])
            num_found += num_own + num_more
            if not num_more:
                break
        prefetch.own = frozenset(own)
        return wanted[:num_found] if own else pages

    def agree(self, operation: Any, agree: Callable[[int], int]) -> None:
        """Have the ranks agree on what of a hit is exact; `agree` gives the least of their numbers."""
        prefetch = self._prefetches.get(operation.handle)
        num_exact = agree(0 if prefetch is None else prefetch.num_exact)
        if prefetch is not None:
            prefetch.num_exact = num_exact

    def keys_to_read(self, operation: Any, pages: list[str]) -> list[str]:
        """The keys of pages of a hit."""
        prefetch = self._prefetches.get(operation.handle)
        own = frozenset[str]() if prefetch is None else prefetch.own
        return [self._own_key(page) if page in own else page for page in pages]

    # ---- The rest ----

    @property
    def directory(self) -> Directory | None:
        """The directory of the store that is attached, if there is one of a kind that can hold it."""
        controller = self._tree.cache_controller
        backend = controller.storage_backend if self._tree.enable_storage else None
        if backend is not self._backend:
            self._backend, self._directory = backend, None
            objects = (
                None
                if backend is None
                else objects_of(backend, controller.storage_config, self._tree.sidecar_pool_specs)
            )
            if objects is not None:
                self._directory = self._make_directory(objects)
            elif backend is not None:
                kind = type(backend).__name__
                logger.info("sglang_pic: %s: rows are stored there, but moved text of other servers is not found", kind)
        return self._directory

    def on_weights(self, tree: PicTree) -> None:
        """The directory of others is no longer ours."""
        self._backend = self._directory = None

    def announce(self, path: BackedPath, exact_end: int) -> bool:
        """SGLang is about to write the last node of a path: note which keys it gets, and what of it to list then.

        Args:
            path: all of it.
            exact_end: what follows is spliced, or stands behind splices.

        Returns:
            Whether it may: not where something is not exact, and the store of a kind that the plugin has no keys in.
        """
        directory, page_size = self.directory, self._tree.page_size
        num_own = len(path.pages) - max(exact_end, path.start) // page_size
        if num_own and directory is None:
            return False
        write = Write(path.pages[-1], num_own)
        if (
            directory is not None
            and is_shared(path.namespace.extra_key)
            and not self._tree.cache_controller.backup_skip
        ):
            start = path.start - path.start % directory.block_tokens
            end = exact_end - exact_end % page_size
            if end > path.start and end - start >= directory.block_tokens:
                # The tree's nodes end anywhere, blocks do not: less than a block is read now, before it is evicted.
                write.path, write.start, write.end = path, start, end
                write.sums = self._sums(path.slots[start : path.start])
        self._writes.append(write)
        return True

    def announce_exact(self, last_page: str | None) -> None:
        """SGLang is about to write a node whose rows are exact, and which is not listed."""
        if last_page is not None:
            self._writes.append(Write(last_page))

    def note_prefetch(
        self, handle: Any, _: Any, ids: Any, *__: Any, matched_prefix_tokens: Any = (), **space: Any
    ) -> None:
        """SGLang is about to look for what follows `matched_prefix_tokens`."""
        start = len(matched_prefix_tokens or ())
        path = np.concatenate([np.asarray(matched_prefix_tokens or (), np.int64), np.asarray(ids, np.int64)])
        namespace = Namespace(space.get("extra_key"), space.get("cache_salt"))
        self._prefetches[handle] = _Prefetch(namespace, as_tokens(path), start)

    def publish(self, operation: Any) -> None:
        """SGLang has put into the tree what came for a prefetch: note which rows may be donors."""
        prefetch = self._prefetches.pop(operation.handle, None)
        num_loaded = self._tree.prefetch_loaded_tokens_by_reqid.get(operation.handle, 0)
        start = self._tree.prefetch_loaded_storage_start_by_reqid.get(operation.handle)
        if prefetch is not None and num_loaded and start is not None and not is_strict(prefetch.namespace.extra_key):
            span, exact_end = (start, start + num_loaded), prefetch.start + prefetch.num_exact
            self._publication.publish_loaded(prefetch.namespace, prefetch.tokens, span, exact_end)

    def _own_key(self, page: str) -> str:
        """The key of a page whose rows came from a splice or stand behind one, computed as this server would."""
        assert self._directory is not None, "only where there is one"
        return hashlib.blake2b(
            page.encode() + self._policy, key=self._directory.fingerprint, digest_size=32
        ).hexdigest()

    @property
    def _is_behind(self) -> bool:
        """Whether the store is slower than requests can wait: until it has done what it was asked, nobody asks more."""
        is_late = self._late or (self._loads and not self._loading)
        return bool(is_late) or len(self._looking) >= _MAX_LOOKUPS

    def _patience_s(self, num_tokens: int) -> float:
        cost, tree = self._planning.cost, self._tree
        if cost is not None:
            return num_tokens * cost.computed_token_us / 1e6
        return float(tree.prefetch_timeout_base + num_tokens // tree.page_size * tree.prefetch_timeout_per_page)

    def _take(self, done: list[_Lookup]) -> None:
        found = [_result(lookup.found) for lookup in done]
        digest = _digest(found)
        least, most, token_ns = self._agreed(digest, -digest, self._token_ns)
        for lookup, paths in zip(done, found, strict=True):
            if least != -most:
                self._series.add(LOOKUPS, value="apart")
                continue
            self._series.add(LOOKUPS, value="found" if paths else "nothing")
            for path in paths:
                self._load(lookup, path, token_ns)
            if lookup.loads:
                self._loading.append(lookup)

    def _load(self, lookup: _Lookup, path: Found, token_ns: int) -> None:
        """Have SGLang load what of a path is not here, if that is sooner than computing what it serves."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tree, (extra_key, cache_salt, _) = self._tree, lookup.namespace
        ids = array("q", path.tokens.astype(np.int64).tobytes())
        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(ids, extra_key, cache_salt=cache_salt)))
        start, node = match.device_prefix_len + match.host_hit_length, match.last_host_node
        cost = self._planning.cost
        # Until a load was measured, one is tried.
        is_late = cost is not None and (len(ids) - start) * token_ns > 1e3 * path.num_equal * cost.computed_token_us
        # As SGLang: what is not on the host is not in the store, nor is what follows it.
        if start >= len(ids) or is_late or not (tree.is_backuped(node) or tree.is_root(node)):
            return
        # NOTE: SGLang keys a load by this id; a client's id is a string, so no client can send this one.
        handle = CacheRequestHandle(("pic-store", next(self._numbers)), 0)  # type: ignore[arg-type]
        # Before SGLang's threads see it.
        self._loads[handle] = _Load(lookup, path.tokens, start, path.sums, time.monotonic())
        tree.prefetch_from_storage(
            handle,
            node,
            ids[start:],
            tree.get_last_hash_value(node),
            tree.get_prefix_hash_values(node) if tree.hicache_storage_pass_prefix_keys else None,
            matched_prefix_tokens=ids[:start],
            extra_key=extra_key,
            cache_salt=cache_salt,
        )
        if tree.has_ongoing_prefetch(handle):
            lookup.loads.add(handle)
        else:
            del self._loads[handle]

    def _finish(self, handle: Any, load: _Load) -> None:
        num_loaded, start = self._tree.pop_prefetch_loaded_span(handle)
        self._tree.release_aborted_request(handle)
        if num_loaded and start is not None:
            self._series.add(LOADED, num_loaded)
            token_ns = 1e9 * (time.monotonic() - load.started_at) / num_loaded
            self._token_ns = int(token_ns if not self._token_ns else _FRESH * token_ns + (1 - _FRESH) * self._token_ns)
            load.lookup.state.of_features.setdefault(LOADED_PATHS, []).append(
                (load.tokens[: start + num_loaded], start)
            )
        load.lookup.loads.discard(handle)
        if not load.lookup.loads and load.lookup in self._loading:
            self._loading.remove(load.lookup)

    def _sums(self, slots: torch.Tensor) -> Sums:
        """The checksum of each page of host slots, its pages of side pools included: `[num_pages]`."""
        controller = self._tree.cache_controller
        side_pools = [controller.mem_pool_host.get_pool(spec.pool_name) for spec in self._tree.sidecar_pool_specs]
        found = []
        for slot in slots[:: self._tree.page_size].tolist():
            page_sum = xxhash.xxh3_64()
            for pool in (controller.storage_host_pool, *side_pools):
                page_sum.update(pool.get_data_page(slot, flat=True).contiguous().view(torch.uint8).numpy())
            found.append(page_sum.intdigest())
        return np.array(found, dtype=np.uint64)

    def _agreed(self, *values: int) -> list[int]:
        """The least of each value over the ranks."""
        tensor = torch.tensor(values, dtype=torch.int64)
        self._tree._all_reduce(tensor, torch.distributed.ReduceOp.MIN)
        return [int(value) for value in tensor]

    def _count(self) -> None:
        for metric, number in ((REFUSED, self._num_refused), (LISTED, self._num_listed)):
            if number > self._exported[metric.name]:
                self._series.add(metric, number - self._exported[metric.name])
                self._exported[metric.name] = number


@contextmanager
def _warning_of_unlisted() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning("sglang_pic: what was written to HiCache's store is not listed: %s", error)


def _num_leading(lookups: deque[_Lookup], holds: Callable[[_Lookup], bool]) -> int:
    return sum(1 for _ in takewhile(holds, lookups))


def _result(found: Future[list[Found]]) -> list[Found]:
    try:
        return found.result(timeout=0)
    except Exception as error:
        logger.warning("sglang_pic: looking text up in HiCache's store failed: %s", error)
        return []


def _digest(found: list[list[Found]]) -> int:
    digest = xxhash.xxh3_64()
    for path in (path for paths in found for path in [*paths, None]):
        digest.update(b"|" if path is None else path.tokens.tobytes())
    return digest.intdigest() >> 2


def _encoded(namespace: Namespace) -> bytes:
    return msgspec.json.encode((namespace.extra_key, namespace.cache_salt))
