"""A server with pins over SGLang's own tree and allocator, without a model."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_pic.adapter.features.pins import ENDED, PIN_BYTES, PINNED_TOKENS, PINS, Pins
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Features
from sglang_pic.adapter.serve.options import RequestOptions
from sglang_pic.adapter.serve.state import RequestState
from sglang_pic.core import ContentIndex, RowNames
from tests.helpers.builders import Kept, make_allocator, make_stations, make_tree, request

POOL = 4096
MAX_PINNED = 1024


class Server:
    """SGLang's tree with its allocator, and requests that live and end as SGLang lets them."""

    def __init__(
        self, page_size: int = 1, *, pool: int = POOL, max_pinned: int = MAX_PINNED, lookahead: int = 0
    ) -> None:
        self.allocator = make_allocator(pool, page_size)
        self.pool, self.page_size, self.lookahead, self.series = pool, page_size, lookahead, Kept()
        self.clock = 0.0
        index = ContentIndex(names=RowNames(page_size, lookahead))
        self.refusal: Fallback | None = None
        eligibility: Any = SimpleNamespace(refusal=lambda _: self.refusal)
        self.pins = Pins(index, eligibility, max_pinned, self.series, now=lambda: self.clock)
        self.stations = make_stations(features=Features([self.pins]))
        self.tree = make_tree(self.allocator, is_eagle=bool(lookahead), stations=self.stations)
        self.running: list[tuple[Any, Any]] = []

    def start(self, tokens: list[int], *, key: str | None = None, salt: str | None = None, **options: Any) -> Any:
        """A request whose rows are in the tree and locked; it runs."""
        length = len(tokens) - self.lookahead
        length -= length % self.page_size
        radix_key = RadixKey(array("q", tokens[: length + self.lookahead]), key, cache_salt=salt)
        found = self.tree.match_prefix(MatchPrefixParams(key=radix_key))
        missing = length - found.device_prefix_len
        lock = self.tree.lock(found.last_device_node)
        evict_from_tree_cache(self.tree, missing)
        own = self.allocator.alloc(missing) if missing else torch.empty(0, dtype=torch.int64)
        assert own is not None, "a request fails for lack of memory"
        slots = torch.cat([self.tree.path_device_indices(found.last_device_node), own])
        result = self.tree.insert(InsertParams(key=radix_key, value=slots, prev_prefix_len=found.device_prefix_len))
        self.tree.unlock(lock)
        state = RequestState(RequestOptions(**options), namespace=Namespace(key, salt))
        req = request(tokens, pic=state, extra_key=key, cache_salt=salt)
        self.running.append((req, self.tree.lock(result.last_device_node)))
        return req

    def end(self, req: Any, reason: Any = None, *, checkpointed: bool = True) -> None:
        """The request leaves: served unless there is another reason, or retracted."""
        (at,) = (i for i, (running, _) in enumerate(self.running) if running is req)
        req.finished_reason = (reason or FINISH_LENGTH(1)) if checkpointed else None
        self.tree.unlock(self.running.pop(at)[1])
        self.tree.on_release(req, checkpointed=checkpointed)

    def serve(self, tokens: list[int], **options: Any) -> None:
        self.end(self.start(tokens, **options))

    def evict_all(self) -> None:
        evict_from_tree_cache(self.tree, self.allocator.available_size() + self.tree.evictable_size())

    def resident(self, tokens: list[int], key: str | None = None, salt: str | None = None) -> int:
        """How much of a text is in the tree."""
        radix_key = RadixKey(array("q", tokens), key, cache_salt=salt)
        return int(self.tree.match_prefix(MatchPrefixParams(key=radix_key)).device_prefix_len)

    @property
    def names(self) -> list[str]:
        return [pin.name for pin in self.pins.report().held]

    @property
    def ended(self) -> dict[str | None, int]:
        return self.series.by_label(ENDED)

    def check(self) -> None:
        """SGLang's own check at idle, and that what pins hold is what is protected."""
        protected = self.tree.protected_size()
        assert self.allocator.available_size() + self.tree.evictable_size() + protected == self.pool
        if not self.running:
            assert protected == self.pins.num_tokens <= self.pins.report().max_tokens
        report = self.pins.report()
        assert report.num_bytes == sum(PIN_BYTES + 4 * pin.tokens for pin in report.held) <= report.max_bytes
        shown = self.series.level(PINS), self.series.level(PINNED_TOKENS)
        assert shown == (len(self.names), self.pins.num_tokens)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(length)]
