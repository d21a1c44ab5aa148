"""Builds the cache inside a scheduler process, when SGLang asks for the backend `pic`.

Owns the order: refuse what is unsupported, read the live model, make the tree, install the hooks. It runs before the
first request; whatever it raises stops the server.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import msgspec
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.runtime_context import get_serving

from sglang_pic.adapter import recorder
from sglang_pic.adapter.audit import hooks as audit_hooks
from sglang_pic.adapter.audit import metrics as audit_metrics
from sglang_pic.adapter.audit.audit import Audit
from sglang_pic.adapter.metrics import Series
from sglang_pic.adapter.probe.ranks import check_alike
from sglang_pic.adapter.serve import forward as forward_hooks
from sglang_pic.adapter.serve import scheduler as scheduler_hooks
from sglang_pic.adapter.serve.accounting import Metrics
from sglang_pic.adapter.serve.cache import PicRadixCache
from sglang_pic.adapter.server_info import ServerInfo
from sglang_pic.adapter.startup import metrics as startup_metrics
from sglang_pic.adapter.startup.calibration import calibrate
from sglang_pic.adapter.startup.row_check import check_rows
from sglang_pic.adapter.startup.self_test import log_result, run_self_test
from sglang_pic.adapter.startup.tokenizer import delimiters_of, read_tokenizer
from sglang_pic.adapter.support import check_support, max_sequences
from sglang_pic.config import PicConfig, load_config
from sglang_pic.core import CostModel
from sglang_pic.runtime.rope import read_geometry
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.views import view_pool

__all__ = ["create_cache"]

logger = logging.getLogger(__name__)


def create_cache(ctx: Any) -> PicRadixCache:
    """Make the cache of one scheduler rank from SGLang's `TreeCacheBuildContext`.

    Raises:
        ConfigError: the configuration is not valid.
        UnsupportedError: the model, its pool, the topology or a flag cannot be served safely, or ranks differ in what
            they read.
        ContractError: the model's rotation is not what its module says, or its rows do not turn by it.
    """
    config = load_config()
    check_support(ctx)
    runner = ctx.tp_worker.model_runner
    splicer = _checked_splicer(ctx)
    cache = create_unified_radix_cache(ctx, cache_class=PicRadixCache)
    assert isinstance(cache, PicRadixCache)
    tokenizer = read_tokenizer(ctx.server_args)
    delimiters = frozenset() if tokenizer is None else delimiters_of(tokenizer)
    check_alike(
        {"configurations": msgspec.json.encode(config), "delimiters": msgspec.json.encode(sorted(delimiters))},
        ctx.tp_group,
    )
    sequences = max_sequences(runner)
    cost = _cost_model(config, runner, splicer, sequences, ctx.tp_group)
    # Each gap is a virtual sequence.
    max_gaps = max(2, min(config.max_gaps, sequences))
    metrics = Metrics(_labels(ctx))
    cache.attach(
        config=config,
        splicer=splicer,
        cost=cost,
        metrics=metrics,
        delimiters=delimiters,
        max_gaps=max_gaps,
        max_sequences=sequences,
    )
    server_info = ServerInfo()
    _install_hooks(ctx, cache, server_info)
    tested = run_self_test(runner, splicer, config, tokenizer=tokenizer, max_gaps=max_gaps, tp_group=ctx.tp_group)
    startup_metrics.export(tested, _labels(ctx))
    log_result(tested, config)
    server_info.add("self_test", lambda: tested)
    logger.info(
        "sglang_pic: %d delimiters, cost %s, config %s",
        len(delimiters),
        "off" if cost is None else msgspec.json.encode(cost).decode(),
        msgspec.json.encode(config).decode(),
    )
    if config.testing.names_on:
        logger.warning(
            "sglang_pic: this server is for tests only: the switches %s are on", ", ".join(config.testing.names_on)
        )
    return cache


def _checked_splicer(ctx: Any) -> Splicer:
    """The splicer of the live model, its rotation proved on the model's modules and rows."""
    runner = ctx.tp_worker.model_runner
    view = view_pool(runner.token_to_kv_pool)
    geometry = read_geometry(runner.model, max_shift=ctx.model_config.context_len)
    splicer = Splicer(view, geometry)
    started_at = time.perf_counter()
    rows = check_rows(runner, splicer, ctx.tp_group)
    logger.info(
        "sglang_pic: %s pool, %d layers: moved rows differ from computed ones by a relative L2 of %.1e (keys of the "
        "first layer), %.1e (keys of any layer; unmoved %.1e), %.1e (values and latent rows); checked in %.0f ms",
        view.kind.value,
        view.num_layers,
        rows.first_keys,
        rows.keys,
        rows.unmoved_keys,
        rows.rest,
        1e3 * (time.perf_counter() - started_at),
    )
    return splicer


def _install_hooks(ctx: Any, cache: PicRadixCache, server_info: ServerInfo) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    config, runner = cache.config, ctx.tp_worker.model_runner
    scheduler_hooks.install(cache)
    forward_hooks.install(cache)
    server_info.install()
    if config.audit_rate > 0:
        cache.audit = Audit(cache, runner, config, Series(audit_metrics.METRICS, _labels(ctx)), ctx.tp_group)
        audit_hooks.install(cache.audit)
        server_info.add("audit", cache.audit.report)
    if config.testing.record_dir is not None:
        recorder.install(cache.splicer.view, Path(config.testing.record_dir), is_first_rank=ctx.tp_rank == 0)
    HookRegistry.apply_hooks()


def _cost_model(config: PicConfig, runner: Any, splicer: Splicer, sequences: int, tp_group: Any) -> CostModel | None:
    if isinstance(config.cost_gate, CostModel):
        return config.cost_gate
    return None if config.cost_gate == "off" else calibrate(runner, splicer, sequences, tp_group)


def _labels(ctx: Any) -> dict[str, str] | None:
    """SGLang's rank labels; every rank plans the same, so only the first one counts."""
    if not ctx.server_args.enable_metrics or ctx.tp_rank != 0:
        return None
    return {"model_name": get_serving().served_model_name, "tp_rank": str(ctx.tp_rank)}
