"""Pins: prompts whose rows are locked in the tree under a name, until they are dropped or the pool needs their slots.

A pin is SGLang's own lock on the node at the prompt's end, so SGLang protects and counts the rows. Pins change only
when a request finishes, allocates or is admitted, in the same order on every tensor-parallel rank.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_pic.adapter.features.parts import Parts
from sglang_pic.adapter.features.window_rows import lock_windows
from sglang_pic.adapter.metrics import Metric, MetricKind, Series, descriptions
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.probe.ranks import agreed_time
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Feature, PicTree
from sglang_pic.adapter.serve.modes import Eligibility
from sglang_pic.adapter.serve.options import FIRM, Skills
from sglang_pic.adapter.serve.state import RequestState, tokens_of
from sglang_pic.adapter.sglang.hooks import hook
from sglang_pic.adapter.sglang.seams import BuildContext, ModelRunner, Req, Tree
from sglang_pic.core import ContentIndex, Path, Reason, RowNames, Tokens, common_len


class PinEnd(Reason):
    """Why a pin ended, or was refused."""

    DROPPED = "dropped", "A request dropped it by its name."
    EXPIRED = "expired", "Its time to live was over."
    FAULT = "fault", "A fault removed its donors, or switched splicing off."
    FLUSHED = "flushed", "The cache was flushed."
    LIMIT = "limit", "Newer pins needed its share of `pin_max_percent`, or of the host memory for pins."
    MEMORY = "memory", "A request needed its slots."
    REFUSED = "refused", "The prompt is longer than all pins together may be, or its rows cannot be spliced."
    REPLACED = "replaced", "Another prompt was pinned under its name."
    UNLOADED = "unloaded", "Its LoRA adapter was unloaded."
    WEIGHTS = "weights", "The weights changed."


PINS: Final = Metric("sglang:pic_pins", MetricKind.GAUGE, "Prompts that are pinned.")
PINNED_TOKENS: Final = Metric(
    "sglang:pic_pinned_tokens", MetricKind.GAUGE, "KV slots locked by pins; a prefix of several pins counts once."
)
ENDED: Final = Metric(
    "sglang:pic_pins_ended_total",
    MetricKind.COUNTER,
    "Pins that ended or were refused, by reason.",
    label="reason",
    values=descriptions(PinEnd),
)
METRICS: Final = (PINS, PINNED_TOKENS, ENDED)


MAX_BYTES: Final = 64 << 20
"""Host memory that all pins together may use."""
PIN_BYTES: Final = 16 << 10
"""Host memory charged for a pin beside its tokens: more than its locks, names and entry in `/server_info` need."""


class PinInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One pin as `/server_info` shows it."""

    name: str
    tokens: int
    """Pinned tokens, in whole pages."""
    digest: str
    """Identifies the prompt; with a `cache_salt` only to those who know the salt."""
    extra_key: str | None
    """As the client sent it; with a LoRA adapter it ends with the adapter's id."""
    has_salt: bool
    """Whether its namespace has a `cache_salt`, which is not shown."""
    priority: int = FIRM
    ttl_s: int | None = None
    """Its time to live, in seconds from when it was pinned."""


class PinReport(msgspec.Struct, frozen=True, kw_only=True):
    """The pins' part of `/server_info`."""

    max_tokens: int
    num_tokens: int
    max_bytes: int
    num_bytes: int
    """Host memory: 16 KiB a pin and 4 bytes a token."""
    held: list[PinInfo]
    """The lowest priority first, and of one priority the oldest: in this order they are released."""


class _Pin(NamedTuple):
    space: Namespace
    """The namespace of its rows in the tree, with our marks."""
    data: bytes
    """Its tokens, and behind them those that the key of its last row has too."""
    locks: ExitStack
    """Locks on its rows."""
    info: PinInfo
    ends_at: float
    """By the clock of the pins; infinity if it has no time to live."""

    @property
    def num_bytes(self) -> int:
        """Host memory charged for it."""
        return PIN_BYTES + 4 * self.info.tokens


class Pins(Feature):
    """The pins of one scheduler rank.

    Args:
        index: pins the donors of pinned prompts.
        eligibility: prompts whose rows may be spliced are pinned.
        max_tokens: KV slots that all pins together may lock.
        series: exports `METRICS`.
        now: a clock in seconds that is the same on all ranks; it is asked when a request finishes while a pin has a
            time to live.
    """

    fault = Fallback.FAULT_PINS

    def __init__(
        self,
        index: ContentIndex,
        eligibility: Eligibility,
        max_tokens: int,
        series: Series,
        *,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._index, self._eligibility, self._max_tokens = index, eligibility, max_tokens
        self._series, self._now = series, now
        # Oldest first, by the client's namespace; shrinks when pins end.
        self._pins: dict[tuple[Namespace, str], _Pin] = {}
        self._prompts = defaultdict[Hashable, _SortedPrompts](partial(_SortedPrompts, index.names))
        self.num_tokens = 0
        """KV slots locked by pins."""
        self._num_bytes = 0
        self._num_mortal = 0

    @classmethod
    def make(cls, ctx: BuildContext, parts: Parts) -> Pins:
        """The pins of a server; they end with their adapter."""
        runner: ModelRunner = ctx.tp_worker.model_runner
        stations = parts.stations
        max_tokens = runner.token_to_kv_pool_allocator.size * stations.config.pin_max_percent // 100
        form = (stations.index, stations.eligibility, max_tokens, stations.series(METRICS))
        pins = cls(*form, now=partial(agreed_time, stations.ranks))

        def after_unload(result: Any, _: object, recv_req: Any) -> None:
            if result.success:
                with stations.recovery.guarded(cls.fault):
                    pins.unload(recv_req.lora_id, parts.tree)

        if runner.lora_manager is not None:
            hook(__name__, "Scheduler.unload_lora_adapter", after_unload)
        return pins

    def on_received(self, state: RequestState) -> None:
        if state.options.skills is Skills.NEAR:
            state.pinned_len = self.num_pinned

    def on_released(self, req: Req, tree: PicTree) -> None:
        """Release pins whose time is over, and apply the request's options: drop a pin, pin its prompt."""
        state: RequestState = req.pic
        options = state.options
        if self._num_mortal:
            self._expire(tree)
        if options.pin is None and options.unpin is None:
            return
        if options.unpin is not None:
            self._end((state.namespace, options.unpin), tree, PinEnd.DROPPED)
        if options.pin is not None:
            refused = PinEnd.WEIGHTS if tree.is_outdated(req) else None
            if refused is None and self._eligibility.refusal(req) is not None:
                refused = PinEnd.REFUSED
            self._hold((state.namespace, options.pin), req, tree, refused)
        self._show()

    def make_room(self, tree: PicTree) -> bool:
        return self.give_back_oldest(tree, PinEnd.MEMORY)

    def on_weights(self, tree: PicTree) -> None:
        self._give_back_all(PinEnd.WEIGHTS)

    def on_index_lost(self) -> None:
        self._give_back_all(PinEnd.FAULT)

    def on_flush(self) -> None:
        self._clear(PinEnd.FLUSHED)

    def reports(self) -> dict[str, msgspec.Struct]:
        return {"pins": self.report()}

    def give_back_oldest(self, tree: Tree, reason: PinEnd) -> bool:
        """Release the oldest pin of the lowest priority, whose rows then can be evicted; False if there is none."""
        if not self._pins:
            return False
        self._end(min(self._pins, key=lambda key: self._pins[key].info.priority), tree, reason)
        self._show()
        return True

    def _expire(self, tree: Tree) -> None:
        now = self._now()
        for key in [key for key, pin in self._pins.items() if pin.ends_at <= now]:
            self._end(key, tree, PinEnd.EXPIRED)
        self._show()

    def unload(self, lora_id: str, tree: Tree) -> None:
        """Release the pins of a LoRA adapter."""
        for key in [key for key in self._pins if key[0].adapter == lora_id]:
            self._end(key, tree, PinEnd.UNLOADED)
        self._show()

    def _give_back_all(self, reason: PinEnd) -> None:
        """Release every pin, in any state after an exception; the index was flushed before."""
        for pin in self._pins.values():
            pin.locks.close()
        self._clear(reason)

    def _clear(self, reason: PinEnd) -> None:
        count = len(self._pins)
        self._pins.clear()
        self._prompts.clear()
        self.num_tokens = self._num_bytes = self._num_mortal = 0
        self._series.add(ENDED, count, value=reason.value)
        self._show()

    def num_pinned(self, path: Path) -> int:
        """How many leading tokens of a donor's path are pinned, in the donor's own namespace."""
        prompts = self._prompts.get(path.namespace)
        return 0 if prompts is None else prompts.shared_len(path.tokens(self._max_tokens))

    def report(self) -> PinReport:
        """The pins' part of `/server_info`."""
        held = sorted((pin.info for pin in self._pins.values()), key=lambda info: info.priority)
        return PinReport(
            max_tokens=self._max_tokens,
            num_tokens=self.num_tokens,
            max_bytes=MAX_BYTES,
            num_bytes=self._num_bytes,
            held=held,
        )

    def _hold(self, key: tuple[Namespace, str], req: Req, tree: Tree, refused: PinEnd | None) -> None:
        prompt = RadixKey(req.origin_input_ids, req.extra_key, cache_salt=req.cache_salt)
        lookahead = self._index.names.lookahead
        length = len(req.origin_input_ids) - lookahead
        length -= length % tree.page_size
        found = tree.match_prefix(MatchPrefixParams(key=prompt))
        if refused is None and (not 0 < length <= self._max_tokens or found.device_prefix_len < length):
            refused = PinEnd.REFUSED
        if refused is not None:
            self._series.add(ENDED, value=refused.value)
            return
        space, named = Namespace(req.extra_key, req.cache_salt), tokens_of(req, length + lookahead)
        tokens, data, options = named[:length], named.tobytes(), req.pic.options
        info = msgspec.structs.replace(_describe(key, tokens), priority=options.pin_priority, ttl_s=options.pin_ttl_s)
        ends_at = inf if info.ttl_s is None else self._now() + info.ttl_s
        # NOTE: locked before the older pin of this name is released, so that rows of both are always protected. If
        # anything fails from here on, each lock belongs to a pin.
        locks = ExitStack()
        locks.callback(tree.unlock, tree.lock(found.last_device_node))
        pin = _Pin(space, data, locks, info, ends_at)
        older = self._pins.pop(key, None)
        self._pins[key] = pin
        if older is not None:
            self._release(older, tree, PinEnd.REPLACED)
        lock_windows(tree, found.last_device_node, 0, length, locks)
        self._index.pin(space, tokens)
        self.num_tokens += self._prompts[space].add(pin.data)
        self._num_bytes += pin.num_bytes
        self._num_mortal += pin.ends_at < inf
        while self.num_tokens > self._max_tokens or self._num_bytes > MAX_BYTES:
            self.give_back_oldest(tree, PinEnd.LIMIT)

    def _end(self, key: tuple[Namespace, str], tree: Tree, reason: PinEnd) -> None:
        pin = self._pins.pop(key, None)
        if pin is not None:
            self._release(pin, tree, reason)

    def _release(self, pin: _Pin, tree: Tree, reason: PinEnd) -> None:
        pin.locks.close()
        self._index.unpin(pin.space, _tokens(pin.data)[: pin.info.tokens])
        prompts = self._prompts[pin.space]
        self.num_tokens -= prompts.remove(pin.data)
        self._num_bytes -= pin.num_bytes
        self._num_mortal -= pin.ends_at < inf
        if prompts.is_empty:
            del self._prompts[pin.space]
        self._series.add(ENDED, value=reason.value)

    def _show(self) -> None:
        self._series.set(PINS, len(self._pins))
        self._series.set(PINNED_TOKENS, self.num_tokens)


class _SortedPrompts:
    """Prompts as sorted bytes: the prompt with the longest common prefix is a neighbour.

    Each ends with the tokens that `names` looks ahead, which have no rows.
    """

    def __init__(self, names: RowNames) -> None:
        self._names = names
        self._sorted: list[bytes] = []

    @property
    def is_empty(self) -> bool:
        return not self._sorted

    def add(self, data: bytes) -> int:
        """Add a prompt; returns how many of its rows no other prompt has."""
        own = self._own_len(data)
        insort(self._sorted, data)
        return own

    def remove(self, data: bytes) -> int:
        """Remove a prompt; returns how many of its rows no other prompt has."""
        del self._sorted[bisect_left(self._sorted, data)]
        return self._own_len(data)

    def shared_len(self, tokens: Tokens) -> int:
        """How many leading tokens are of rows of any prompt."""
        found = ((common_len(tokens, other), len(other)) for other in self._nearest(tokens))
        return max((min(shared, length - self._names.lookahead) for shared, length in found), default=0)

    def _own_len(self, data: bytes) -> int:
        tokens = _tokens(data)
        shared = max((common_len(tokens, other) for other in self._nearest(tokens)), default=0)
        return len(tokens) - self._names.lookahead - self._names.parted(shared)[0]

    def _nearest(self, tokens: Tokens) -> list[Tokens]:
        place = bisect_left(self._sorted, tokens.tobytes())
        return [*map(_tokens, self._sorted[max(0, place - 1) : place + 1])]


def _tokens(data: bytes) -> Tokens:
    return np.frombuffer(data, dtype="<i4")


def _describe(key: tuple[Namespace, str], tokens: Tokens) -> PinInfo:
    space, name = key
    digest = hashlib.sha256(msgspec.json.encode([*space, tokens.tolist()])).hexdigest()[:16]
    return PinInfo(
        name=name, tokens=len(tokens), digest=digest, extra_key=space.extra_key, has_salt=bool(space.cache_salt)
    )
