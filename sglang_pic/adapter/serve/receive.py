"""The hooks on SGLang's scheduler: options and namespace of a request, admission, counts in responses, new weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from sglang_pic.adapter.namespace import OFF_LANE, Namespace, tree_key, unmarked
from sglang_pic.adapter.serve.admission import Admission, PicPrefillAdder
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Features
from sglang_pic.adapter.serve.modes import Modes
from sglang_pic.adapter.serve.options import Mode, RequestOptions, parse_options
from sglang_pic.adapter.serve.state import FIRST, Counts, Epoch, RequestState, is_apart, keep_apart
from sglang_pic.adapter.serve.tree import PicRadixCache
from sglang_pic.adapter.sglang.hooks import hook
from sglang_pic.adapter.sglang.seams import Req
from sglang_pic.core import ReusePolicy, has_bolder_preset
from sglang_pic.errors import ConfigError

logger = logging.getLogger(__name__)


def install(tree: PicRadixCache, admission: Admission, policy: ReusePolicy) -> None:
    """Register the hooks; SGLang applies them when its registry is applied. `policy` is the server's own."""
    stations = admission.stations

    def on_request(_: None, req: Req, *args: object, **kwargs: object) -> None:
        try:
            epoch = Epoch(num_weights=tree.num_weights, restarts=stations.faults.num_restarts)
            receive(req, stations.features, policy, stations.modes, epoch=epoch)
        except Exception as error:
            serve_as_opted_out(req)
            stations.recovery.recover([req], Fallback.FAULT_OPTIONS, error)

    def adder_of(_: type, _scheduler: object) -> Callable[..., PicPrefillAdder]:
        return partial(PicPrefillAdder, admission)

    def after_weights(*_: object, **__: object) -> None:
        tree.change_weights()

    hook(__name__, "Req.__init__", on_request)
    hook(__name__, "Scheduler.get_prefill_adder_class", adder_of)
    hook(__name__, "Scheduler.record_weight_version_change", after_weights)
    hook(__name__, "SchedulerWeightUpdaterManager.end_weight_update", after_weights)
    # NOTE: an update that fails records no version, and may have changed the weights: all but a draft's.
    hook(__name__, "SchedulerWeightUpdaterManager.update_weights_from_disk", after_weights)
    hook(__name__, "SchedulerWeightUpdaterManager.update_weights_from_ipc", after_weights)
    # Its session goes on after a failure, and requests may be served before its end.
    hook(__name__, "SchedulerWeightUpdaterManager.update_weights_from_distributed", after_weights)
    hook(__name__, "SchedulerWeightUpdaterManager.update_weights_from_tensor", after_weights)
    stations.modes.install()
    install_details()


def install_details() -> None:
    """Register the hook that shows spliced tokens in responses."""
    hook(__name__, "SchedulerOutputStreamer.get_cached_tokens_details", _details)


def receive(req: Req, features: Features, policy: ReusePolicy, modes: Modes, *, epoch: Epoch = FIRST) -> None:
    """Set `req.pic`, and `req.extra_key`, the key of the request's rows in the tree.

    `policy` and `modes` are the server's. If a feature raises, the key is unchanged.
    """
    # The front end has answered bad options and keys with HTTP 400; a request that came another way is not spliced.
    extra_key = unmarked(req.extra_key, req.lora_id)
    try:
        options = parse_options(req.sampling_params.custom_params)
        if extra_key != req.extra_key:
            raise ConfigError("its extra_key contains a mark reserved for the plugin.")
    except ConfigError as error:
        logger.warning("sglang_pic: request %s is served with mode off: %s", req.rid, error)
        options = RequestOptions(mode=Mode.OFF)
    options = msgspec.structs.replace(options, mode=modes.decide(req, options.mode))
    namespace = Namespace(extra_key, req.cache_salt, req.lora_id)
    state = req.pic = RequestState(options, namespace=namespace, epoch=epoch)
    if options.mode is Mode.AUTO:
        for feature in features:
            feature.on_received(state)
        if not modes.is_on:
            state.diverted = Fallback.SWITCHED
    state.lane = OFF_LANE if is_apart(req) else options.lane(policy)
    state.policy = options.policy(policy)
    key = partial(tree_key, extra_key, adapter=req.lora_id, generation=state.epoch.generation, restarts=epoch.restarts)
    req.extra_key = key(lane=state.lane)
    # Rows without a lane may depend on bolder splices than the request wants.
    if state.lane is not None and not has_bolder_preset(policy, state.policy):
        state.base = Namespace(key(), req.cache_salt)


def serve_as_opted_out(req: Req) -> None:
    """Serve a request whose `receive` failed as if it had opted out."""
    namespace = Namespace(unmarked(req.extra_key, req.lora_id), req.cache_salt, req.lora_id)
    req.pic = RequestState(RequestOptions(mode=Mode.OFF), namespace=namespace)
    keep_apart(req)


def _details(result: dict[str, Any] | None, _streamer: object, req: Req) -> dict[str, Any] | None:
    """Show spliced tokens as parts of the device's and the host's, which SGLang and its benchmark add up.

    A request without cached tokens gets details only if there is a reason for it.
    """
    counts: Counts = req.pic.counts
    reason = counts.reason
    if result is None and not counts.guarded and reason is None:
        return None
    host = req.cached_tokens_host + counts.fetched
    return {
        **(result or {}),
        "device": req.cached_tokens - host - req.cached_tokens_storage,
        "host": host,
        "pic": counts.chunk_hit,
        **({"pic_host": counts.fetched} if counts.fetched else {}),
        "pic_behind_change": counts.behind_change,
        "pic_guarded": counts.guarded,
        **({"pic_inherited": counts.inherited} if counts.inherited else {}),
        **({"pic_reason": reason.value} if reason else {}),
    }
