"""Computes approximate rows again, into the slots that they have in the radix tree.

    repair   the end of a prompt that was just served, where its rows were spliced, beside the steps of its answer
    heal     a prompt of which a later request proved that it lives on, from its first approximate row on, when idle

    path of a prompt   [0, at)  as it is   [at, at + 256)  computed in this step   [..., end)  in later ones

The rows keep their slots, so that running requests, later matches and splits of the tree's nodes read the new ones from
the next pass on; nothing is allocated, and a prompt that is given up is better as far as it came. Each step finds the
path anew, locks it and unlocks it once the pass is queued: whoever gets a freed slot writes it from a later pass on the
same stream.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import msgspec

from sglang_pic.adapter.between_rounds import Passes, Worker, may_queue
from sglang_pic.adapter.heal import metrics
from sglang_pic.adapter.heal.metrics import HealEnd
from sglang_pic.adapter.metrics import Series
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.probe.prompt_pass import STEP_TOKENS, PromptPass, has_adapter
from sglang_pic.adapter.seams import ModelRunner, Req, Scheduler
from sglang_pic.adapter.serve.cache import PicRadixCache
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.media import tokens_of
from sglang_pic.adapter.serve.planning import tree_namespace, wants_little
from sglang_pic.adapter.serve.renewal import Renewal
from sglang_pic.adapter.serve.state import RequestState, is_apart
from sglang_pic.config import PicConfig
from sglang_pic.core import Path, Tokens, common_len

# Of each kind. A prompt that waits is a copy of its token ids.
_MAX_WAITING = 64


class HealReport(msgspec.Struct, frozen=True, kw_only=True):
    """The healer's part of `/server_info`; tokens since the server started."""

    num_spliced: int
    """Of all requests: `heal_ratio` times this may be healed."""
    num_repaired: int
    num_healed: int
    num_waiting: int
    """Prompts with rows that are to be computed again."""
    ended: dict[str, int]
    """Prompts by how it ended."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt with rows that are to be computed again."""

    kind: str
    space: Namespace
    """Where its rows are in the tree."""
    tokens: Tokens
    state: RequestState
    """Of the request that served it, or began with it."""
    lora_id: str | None
    at: int = 0
    """What stands before is done, or is not to be done."""


class Healer(Worker, Renewal):
    """Repairs and heals on one scheduler rank; `Renewal` and `Worker` describe the methods that they declare.

    Args:
        runner: SGLang's model runner.
        tree: where the rows are.
        config: the operator's settings.
        series: exports this rank's `metrics.METRICS`.
        passes: shared with the other workers.
    """

    def __init__(
        self, runner: ModelRunner, tree: PicRadixCache, config: PicConfig, series: Series, passes: Passes
    ) -> None:
        super().__init__(passes, Fallback.FAULT_RENEWAL)
        self.recover = tree.recover
        self._runner, self._tree, self._config, self._series = runner, tree, config, series
        # The repairs in order, of the others the youngest first: the session that came last is the likeliest to go on.
        self._repairs: deque[_Prompt] = deque()
        self._heals: list[_Prompt] = []
        self._num_spliced = 0
        self._done: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        return bool(self._repairs or self._may_heal)

    @property
    def _may_heal(self) -> bool:
        allowed = self._config.heal_ratio * self._num_spliced
        return bool(self._heals) and self._done["heal"] + STEP_TOKENS <= allowed

    def admitted(self, req: Req) -> None:
        with self.guarded():
            self._admitted(req)

    def _admitted(self, req: Req) -> None:
        state: RequestState = req.pic
        self._num_spliced += state.counted.spliced
        is_first = state.matched_len == state.admitted_from
        is_wanted = self._config.heal_ratio and is_first and state.num_inherited and state.media is None
        if not is_wanted or is_apart(req):
            return
        tokens = tokens_of(req, state.matched_len)
        prompt = _Prompt("heal", tree_namespace(req), tokens, state, req.lora_id)
        # Of a session the last turn has all that the others have.
        self._heals = [each for each in self._heals if not _begins(prompt, each)]
        self._heals.append(prompt)
        if len(self._heals) > _MAX_WAITING:
            self._end(self._heals.pop(0), HealEnd.QUEUE_FULL)

    def published(self, req: Req, path_len: int, adopted_from: int) -> None:
        with self.guarded():
            self._published(req, path_len, adopted_from)

    def _published(self, req: Req, path_len: int, adopted_from: int) -> None:
        state: RequestState = req.pic
        # What an earlier chunk left in the tree is this request's own, too.
        if state.own_end is None or adopted_from != state.own_end:
            state.own_from = adopted_from
        state.own_end = path_len
        num_prompt = len(req.origin_input_ids)
        end = num_prompt - num_prompt % self._tree.page_size
        # A pass of ours computes token ids alone.
        is_wanted = self._config.repair_tokens and state.media is None and not wants_little(req)
        if not is_wanted or path_len < end or state.is_repaired:
            return
        state.is_repaired = True
        first = max(state.own_from, num_prompt - self._config.repair_tokens)
        start = next((max(first, span[0]) for span in state.spliced if span[1] > first), end)
        if start >= end:
            return
        tokens = tokens_of(req, end)
        self._repairs.append(_Prompt("repair", tree_namespace(req), tokens, state, req.lora_id, start))
        if len(self._repairs) > _MAX_WAITING:
            self._end(self._repairs.popleft(), HealEnd.QUEUE_FULL)

    def is_due(self, scheduler: Scheduler) -> bool:
        return bool(self._repairs) and may_queue(scheduler)

    def abandon(self) -> None:
        self._passes.wait()
        for prompt in (*self._repairs, *self._heals):
            self._end(prompt, HealEnd.FLUSHED)
        self._repairs.clear()
        self._heals.clear()

    def report(self) -> HealReport:
        """What `/server_info` shows."""
        return HealReport(
            num_spliced=self._num_spliced,
            num_repaired=self._done["repair"],
            num_healed=self._done["heal"],
            num_waiting=len(self._repairs) + len(self._heals),
            ended=dict(self._ended),
        )

    def step(self, scheduler: Scheduler) -> None:
        """Compute the next rows of the first prompt that still has some."""
        while self.has_work:
            waiting = self._repairs if self._repairs else self._heals
            prompt = waiting[0] if self._repairs else waiting[-1]
            ended = self._advance(prompt, scheduler)
            if ended is None:
                return
            waiting.remove(prompt)
            self._end(prompt, ended)

    def _advance(self, prompt: _Prompt, scheduler: Scheduler) -> HealEnd | None:
        """Queue a step; why nothing is left to do, if so."""
        tree, end = self._tree, len(prompt.tokens)
        if not tree.auditor.serves(prompt.state) or (
            prompt.lora_id is not None and not has_adapter(self._runner.lora_manager, prompt.lora_id)
        ):
            return HealEnd.SUSPENDED
        # NOTE: what is exact stays as it is, whoever computed it; what a heal computes behind it is exact too.
        at = max(prompt.at, tree.publication.exactness(prompt.space, prompt.tokens).exact_len)
        if at >= end:
            return HealEnd.DONE
        # What a step leaves behind it is whole pages: of a page that two steps share nothing would be known.
        stop = min(at + STEP_TOKENS - (at + STEP_TOKENS) % tree.page_size, end)
        resolver, path = tree.planning.resolver(tree), Path(prompt.space, [prompt.tokens[:stop]])
        try:
            if resolver(path, stop) < stop:
                return HealEnd.EVICTED
            slots = resolver.rows(path, 0, stop).slots
            tokens = prompt.tokens[:stop].astype("int64")
            computation = PromptPass(self._runner, tokens, slots, start=at, lora_id=prompt.lora_id)
            with self._passes.queued(scheduler):
                computation.step()
        finally:
            resolver.release()
        tree.publication.renew(prompt.space, prompt.tokens[:stop], at)
        prompt.at = stop
        self._done[prompt.kind] += stop - at
        self._series.add(metrics.TOKENS, stop - at, value=prompt.kind)
        return None

    def _end(self, prompt: _Prompt, reason: HealEnd) -> None:
        self._ended[reason.value] += 1
        self._series.add(metrics.ENDED, value=reason.value)


def _begins(prompt: _Prompt, other: _Prompt) -> bool:
    """Whether a prompt begins with another one."""
    same = prompt.space == other.space and len(other.tokens) <= len(prompt.tokens)
    return same and common_len(other.tokens, prompt.tokens) == len(other.tokens)
