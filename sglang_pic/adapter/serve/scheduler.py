"""The hooks on SGLang's scheduler: options on requests, our admission, chunk hits in responses.

Installed only in a process that has the cache.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_pic.adapter.serve.admission import PicPrefillAdder
from sglang_pic.adapter.serve.cache import PicRadixCache
from sglang_pic.adapter.serve.options import Mode, RequestOptions, parse_options, renewed_key, strict_key
from sglang_pic.adapter.serve.state import RequestState, is_streaming
from sglang_pic.errors import ConfigError

__all__ = ["install", "tree_key"]

logger = logging.getLogger(__name__)


def install(cache: PicRadixCache) -> None:
    """Register the hooks; SGLang applies them when its registry is applied."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    allow_testing = cache.config.testing.request_options

    def on_request(_: None, req: Any, *args: object, **kwargs: object) -> None:
        # The front end has refused bad options with HTTP 400; one that came another way is served exactly.
        try:
            options = parse_options(req.sampling_params.custom_params, allow_testing=allow_testing)
        except ConfigError as error:
            logger.warning("sglang_pic: request %s is served with mode off: %s", req.rid, error)
            options = RequestOptions(mode=Mode.OFF)
        state = req.pic = RequestState(options, namespace=(req.extra_key, req.cache_salt))
        audit = cache.audit
        if audit is not None and options.mode is Mode.AUTO:
            state.generation = audit.generation(state.namespace)
            state.is_diverted = not audit.is_on(state.namespace)
        req.extra_key = tree_key(req)

    def adder_class(_: type, _scheduler: Any) -> type[PicPrefillAdder]:
        return PicPrefillAdder

    def details(result: dict[str, int] | None, _streamer: Any, req: Any) -> dict[str, int] | None:
        if result is None:
            return None
        num_chunk_hit = req.pic.num_chunk_hit
        # Where SGLang has no breakdown yet it reports all cached tokens as the device's.
        if not (req.cached_tokens_device or req.cached_tokens_host or req.cached_tokens_storage):
            result["device"] = max(0, result["device"] - num_chunk_hit)
        return {**result, "pic": num_chunk_hit}

    managers = "sglang.srt.managers"
    HookRegistry.register(f"{managers}.schedule_batch.Req.__init__", on_request, HookType.AFTER)
    HookRegistry.register(f"{managers}.scheduler.Scheduler.get_prefill_adder_class", adder_class, HookType.AFTER)
    HookRegistry.register(
        f"{managers}.scheduler_components.output_streamer.SchedulerOutputStreamer.get_cached_tokens_details",
        details,
        HookType.AFTER,
    )


def tree_key(req: Any) -> str | None:
    """The key under which a request that has its `pic` state is looked up and kept in the tree."""
    state: RequestState = req.pic
    # A later turn of a streaming session goes on with the row of the first, whatever it asks for itself.
    if state.options.mode is Mode.OFF or state.is_diverted or is_streaming(req):
        return strict_key(req.extra_key)
    return renewed_key(req.extra_key, state.generation)
