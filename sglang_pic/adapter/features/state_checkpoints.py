"""Keeps the states of hybrid models where prompts are known to part; SGLang's own cache serves the rest.

Layers with recurrent state go on only from where a state was kept, and a prefill pass keeps one: with the strategies
`extra_buffer` and `extra_buffer_lazy` at its end, or at `Req.mamba_branching_seqlen`, where SGLang saw an earlier
prompt part. Here that place is chosen by `checkpoints.py`, which knows it a prompt earlier. What is kept there is
what SGLang computes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

from sglang.srt.runtime_context import get_schedule

from sglang_pic.adapter.metrics import Metric, MetricKind, Series
from sglang_pic.adapter.sglang.contract import FEATURES, check_contract, describe_changes
from sglang_pic.adapter.sglang.hooks import hook
from sglang_pic.adapter.sglang.seams import BuildContext, StatefulReq
from sglang_pic.checkpoints import Checkpoints
from sglang_pic.core import load_loops
from sglang_pic.core.chunker import xxh3_name
from sglang_pic.core.tokens import Tokens, as_tokens
from sglang_pic.errors import ContractError

logger = logging.getLogger(__name__)

ASKED: Final = "asked"
KEPT: Final = "kept"
HIT: Final = "hit"
FAULT: Final = "fault"
EVENTS: Final = Metric(
    "sglang:pic_state_checkpoints_total",
    MetricKind.COUNTER,
    "States of models with recurrent state at places of our choice, where SGLang keeps states in an extra buffer.",
    label="event",
    values={
        ASKED: "A prompt got a place that SGLang would not have chosen.",
        KEPT: "A pass kept its state there.",
        HIT: "A prompt went on from such a state.",
        FAULT: "An exception: SGLang alone chooses until the server restarts.",
    },
)
METRICS: Final = (EVENTS,)

_MAX_KEPT: Final = 4096


class StateCheckpoints:
    """The places of one scheduler rank; every rank chooses the same.

    Args:
        places: the rule, with the statistics of earlier prompts.
        grid: states lie at multiples of so many tokens.
        series: exports `METRICS`.
    """

    def __init__(self, places: Checkpoints, grid: int, series: Series) -> None:
        self._places, self._grid, self._series = places, grid, series
        self._is_off = False
        """Whether an exception has left the choice to SGLang."""
        self._kept = OrderedDict[int, None]()
        """The last places where a state was kept, by a hash of namespace and tokens before it."""

    def track(self, original: Callable[[Any, StatefulReq], Any], batch: Any, req: StatefulReq) -> Any:
        """Around SGLang's choice of the state that a request's prefill pass keeps."""
        self._guarded(self._choose, req)
        entry = original(batch, req)
        self._guarded(self._note, req)
        return entry

    def _choose(self, req: StatefulReq) -> None:
        """Before a request's first pass: learn from its prompt, and ask for its place."""
        if hasattr(req, "pic"):
            return
        req.pic = None
        # A session keeps its rows and its state itself.
        if len(req.origin_input_ids) < self._grid or req.session is not None or req.skip_radix_cache_insert:
            return
        prompt, namespace = as_tokens(req.origin_input_ids), _namespace(req)
        if req.prefix_len and _name(prompt[: req.prefix_len], namespace) in self._kept:
            self._series.add(EVENTS, value=HIT)
        stock = req.mamba_branching_seqlen
        place = self._places.choose(prompt, req.prefix_len, stock, namespace)
        if place is not None and place != stock:
            req.pic = req.mamba_branching_seqlen = place
            self._series.add(EVENTS, value=ASKED)

    def _note(self, req: StatefulReq) -> None:
        """After SGLang's choice: whether this pass keeps its state at our place."""
        place: int | None = req.pic
        if place is None or place > req.extend_end:
            return
        req.pic = None
        if req.kv.mamba_last_track_seqlen == place:
            self._series.add(EVENTS, value=KEPT)
            self._kept[_name(as_tokens(req.origin_input_ids)[:place], _namespace(req))] = None
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)

    def _guarded(self, step: Callable[[StatefulReq], None], req: StatefulReq) -> None:
        # NOTE: ranks must keep the same states. What raises on one raises on all, and all leave the choice to SGLang.
        if self._is_off:
            return
        try:
            step(req)
        except Exception:
            self._is_off = True
            self._series.add(EVENTS, value=FAULT)
            logger.exception("sglang_pic: SGLang alone chooses where states are kept from here on")


def install(ctx: BuildContext, labels: Mapping[str, str] | None) -> StateCheckpoints | None:
    """Register the hook, for a server that keeps states in an extra buffer; None for others.

    Args:
        ctx: what SGLang hands over.
        labels: of the rank that exports metrics.
    """
    try:
        changed = check_contract(FEATURES["checkpoints"], without="checkpoints")
    except ContractError as error:
        logger.warning("sglang_pic: states of recurrent layers are kept as without the plugin: %s", error)
        return None
    from sglang.srt.runtime_context import get_exec, mamba_checkpoint_grid

    if not get_exec().mamba.enable_mamba_extra_buffer:
        return None
    grid, schedule = mamba_checkpoint_grid(ctx.params.page_size), get_schedule()
    chunk = schedule.chunked_prefill_size or 0
    load_loops()  # No request waits for the compiler.
    places = Checkpoints(grid, chunk if chunk > 0 else schedule.max_prefill_tokens)
    made = StateCheckpoints(places, grid, Series(METRICS, labels))
    hook(__name__, "_mamba_radix_cache_v2_req_prepare_for_extend", made.track)
    if ctx.tp_rank == 0:
        logger.info("sglang_pic: states are kept where prompts part, at multiples of %d tokens", grid)
        if changed:
            logger.warning("sglang_pic: %s", describe_changes(changed))
    return made


def _namespace(req: StatefulReq) -> int:
    """A hash of what a request's rows are shared within."""
    return xxh3_name(memoryview(repr((req.extra_key, req.cache_salt)).encode("utf8", "surrogatepass")))


def _name(tokens: Tokens, namespace: int) -> int:
    return xxh3_name(memoryview(tokens.tobytes())) ^ namespace
