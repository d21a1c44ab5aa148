"""Builds the cache in a scheduler process, when SGLang asks for the backend `pic`.

This runs before the first request. Any exception stops the server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel, get_schedule, get_serving

from sglang_pic.adapter import server_info, support
from sglang_pic.adapter.features import disaggregation, dp_attention, images, prefix_only, tenants
from sglang_pic.adapter.features import pins as pin_metrics
from sglang_pic.adapter.features.audit import audit_hooks, audit_metrics
from sglang_pic.adapter.features.audit.audit import Audit
from sglang_pic.adapter.features.drafts.draft import Draft, read_drafts
from sglang_pic.adapter.features.drafts.draft_on_host import DraftsOnHost, is_stored_whole
from sglang_pic.adapter.features.hicache import hicache_tree
from sglang_pic.adapter.features.hicache.hicache_tree import HiCacheTree
from sglang_pic.adapter.features.hicache.host_tier import HostTier
from sglang_pic.adapter.features.hicache.store import StoreTier
from sglang_pic.adapter.features.images import Images
from sglang_pic.adapter.features.pins import Pins
from sglang_pic.adapter.features.tenants import Tenants
from sglang_pic.adapter.features.window_rows import WindowRowsInTree, keep_rows
from sglang_pic.adapter.metrics import Series
from sglang_pic.adapter.probe.extend import on_forward_stream
from sglang_pic.adapter.probe.gathered import gathers
from sglang_pic.adapter.probe.ranks import agreed_time, check_alike, fault_group, serving_group
from sglang_pic.adapter.serve import account, faults, forward, modes, publish, receive
from sglang_pic.adapter.serve import planning as plan_metrics
from sglang_pic.adapter.serve.account import Accounting
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.faults import Faults
from sglang_pic.adapter.serve.feature import Feature, Features
from sglang_pic.adapter.serve.forward import ForwardPath
from sglang_pic.adapter.serve.modes import Modes
from sglang_pic.adapter.serve.options import Mode
from sglang_pic.adapter.serve.planning import Planning
from sglang_pic.adapter.serve.publish import Publication
from sglang_pic.adapter.serve.traffic_log import TrafficLog
from sglang_pic.adapter.serve.tree import PicRadixCache
from sglang_pic.adapter.sglang.contract import changed_attention, describe_changes
from sglang_pic.adapter.sglang.hooks import apply_hooks
from sglang_pic.adapter.sglang.seams import BuildContext, ModelRunner, TpGroup
from sglang_pic.adapter.startup import certified, startup_metrics
from sglang_pic.adapter.startup.calibration import calibrate, calibrate_fetch
from sglang_pic.adapter.startup.fingerprint import read_fingerprint
from sglang_pic.adapter.startup.row_check import DraftInput, check_rows
from sglang_pic.adapter.startup.self_test import log_result, run_self_test
from sglang_pic.adapter.startup.tokenizer import Tokenizer, delimiters_of, read_tokenizer, texts_of
from sglang_pic.adapter.support import (
    always_computed,
    check_features,
    check_support,
    disaggregation_mode,
    max_keys,
    max_sequences,
)
from sglang_pic.config import PicConfig, load_config
from sglang_pic.core import (
    ContentIndex,
    CostModel,
    Lexicon,
    PositionSteps,
    RowNames,
    costs,
    load_loops,
)
from sglang_pic.runtime.host_rows import view_host_pool, view_window_host_pools
from sglang_pic.runtime.rope import read_geometry
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.views import view_pool

logger = logging.getLogger(__name__)


class _LiveModel(NamedTuple):
    """What start-up read from the live model, its drafts and its tokenizer; the same on every rank."""

    splicer: Splicer
    tokenizer: Tokenizer | None
    delimiters: frozenset[int]
    lexicon: Lexicon | None
    max_sequences: int
    max_keys: int
    cost: CostModel | None
    drafts: Sequence[Draft]
    """A row depends on one later token for each draft."""


def create_cache(ctx: BuildContext, *, changed_bodies: Sequence[str] = ()) -> UnifiedRadixCache:
    """Make the cache of one scheduler rank. Decode servers and prefix-only servers get SGLang's own cache.

    Args:
        ctx: SGLang's build context.
        changed_bodies: functions of SGLang whose source differs from the tested version, from `check_contract`.

    Raises:
        ConfigError: the configuration is not valid.
        UnsupportedError: a model, pool, topology or flag is not supported, or ranks read different values.
        ContractError: the model's rotation differs from what its rotary module says or from its KV rows, a function of
            SGLang could not be hooked, or a feature needs a function that this SGLang does not have.
    """
    config = load_config()
    if reason := support.prefix_only(ctx):
        modes = Modes(config, Mode.OFF)
        return prefix_only.create_cache(ctx, reason, modes, _labels(ctx), keeps_states=config.checkpoints)
    check_support(ctx)
    warn_of_changes(ctx, [*changed_bodies, *check_features(ctx)])
    if (mode := disaggregation_mode(ctx)) == "decode":
        return disaggregation.create_decode_cache(ctx, config.core, _make_modes(ctx, config))
    runner, labels = ctx.tp_worker.model_runner, _labels(ctx)
    audit = _make_audit(ctx, config, Series(audit_metrics.METRICS, labels))
    with on_forward_stream(runner):
        path, drafts = _checked_path(ctx, audit, labels)
        model = _read_model(ctx, config, path.splicer, drafts)
    certificate = certified.certify(ctx, config, model.splicer, labels)
    load_loops()  # No request waits for the compiler.
    cache = _make_cache(ctx, config, model, path, audit, labels)
    planning = cache.planning
    reports: dict[str, Callable[[], msgspec.Struct]] = {"faults": cache.faults.report, "modes": planning.modes.report}
    reports["index"] = cache.publication.report
    if certificate is not None:
        reports["certificate"] = lambda: certificate
    server_info.install(reports, cache.features.reports, get_parallel().dp_rank)
    # NOTE: these hooks share targets. SGLang wraps a target only once, so register them all before `apply_hooks`.
    receive.install(cache, config.core, cache.planning.modes)
    if audit is not None:
        audit_hooks.install(audit)
    if mode == "prefill":
        disaggregation.install_sender()
    apply_hooks()
    with on_forward_stream(runner):
        tested = run_self_test(
            runner, model.splicer, config, tokenizer=model.tokenizer, max_gaps=planning.max_gaps, tp_group=ctx.tp_group
        )
    startup_metrics.export(tested, labels)
    log_result(tested, config)
    reports["self_test"] = lambda: tested
    # Only now: an exception during start-up must stop the server, later ones must not.
    path.recover = cache.recover
    if audit is not None:
        audit.recover = cache.recover
    cost = "off" if planning.cost is None else msgspec.json.encode(planning.cost).decode()
    text = msgspec.json.encode(config.without_secrets()).decode()
    logger.info("sglang_pic: %d delimiters, cost %s, config %s", len(model.delimiters), cost, text)
    return cache


def warn_of_changes(ctx: BuildContext, changed_bodies: Sequence[str]) -> None:
    """Log on one rank which functions of SGLang differ from the tested version, those of the backend included."""
    if ctx.tp_rank != 0:
        return
    backend = support.prefill_backend(ctx.tp_worker.model_runner)
    changed = [*changed_bodies, *changed_attention(backend)]
    if changed:
        logger.warning("sglang_pic: %s", describe_changes(changed))


def _make_audit(ctx: BuildContext, config: PicConfig, series: Series) -> Audit | None:
    """The audit; `None` if `audit_rate` is 0, or with DP attention."""
    if not config.audit_rate:
        return None
    if serving_group(ctx.tp_group) is not ctx.tp_group:
        if ctx.tp_rank == 0:
            logger.info("sglang_pic: audits are off with DP attention: the pass of an audit would need every rank")
        return None
    sends_rows = disaggregation_mode(ctx) == "prefill"
    return Audit(ctx.tp_worker.model_runner, config, series, ctx.tp_group, sends_rows=sends_rows)


def _make_modes(ctx: BuildContext, config: PicConfig) -> Modes:
    """The modes of requests. If the server's flags make `off` the default, one rank logs why."""
    reason = always_computed(ctx, Fallback.OFF)
    if reason and ctx.tp_rank == 0:
        logger.info("sglang_pic: %s", reason)
    return Modes(config, Mode.OFF if reason else None, Series(modes.METRICS, _labels(ctx)))


def _read_model(ctx: BuildContext, config: PicConfig, splicer: Splicer, drafts: Sequence[Draft]) -> _LiveModel:
    runner = ctx.tp_worker.model_runner
    tokenizer, lost = read_tokenizer(ctx.server_args)
    if lost:
        logger.warning("sglang_pic: %s", lost)
    delimiters = frozenset() if tokenizer is None else delimiters_of(tokenizer)
    texts = None if tokenizer is None else texts_of(tokenizer, delimiters)
    check_alike(
        {
            "configurations": repr(config).encode(),
            "delimiters": msgspec.json.encode(sorted(delimiters)),
            "texts of tokens": msgspec.json.encode(texts),
        },
        ctx.tp_group,
    )
    runners = [runner, *(draft.runner for draft in drafts)]
    sequences = min(max_sequences(each) for each in runners)
    keys = min(max_keys(each) for each in runners)
    cost = _read_costs(ctx, config, splicer, sequences, keys)
    lexicon = None if texts is None else Lexicon(texts)
    return _LiveModel(splicer, tokenizer, delimiters, lexicon, sequences, keys, cost, drafts)


def _read_costs(
    ctx: BuildContext, config: PicConfig, splicer: Splicer, max_sequences: int, max_keys: int
) -> CostModel | None:
    """The costs for the cost gate: measured, or from the configuration; `None` if the gate is off."""
    if config.cost_gate == "off":
        return None
    if isinstance(config.cost_gate, CostModel):
        cost = config.cost_gate
    else:
        schedule = get_schedule()
        chunk = schedule.chunked_prefill_size or 0
        cost = calibrate(
            ctx.tp_worker.model_runner,
            splicer,
            max_sequences=max_sequences,
            max_keys=max_keys,
            max_tokens=chunk if chunk > 0 else schedule.max_prefill_tokens,
            tp_group=ctx.tp_group,
        )
    costs.report(cost, ctx.model_config.context_len)
    return cost


def _make_cache(
    ctx: BuildContext,
    config: PicConfig,
    model: _LiveModel,
    path: ForwardPath,
    audit: Audit | None,
    labels: dict[str, str] | None,
) -> PicRadixCache:
    """The radix tree with its planning, publication, faults and features."""
    tree, windows, host, cost = _make_tree(ctx, model, path.splicer)
    media = images.make(ctx, [draft.runner.model for draft in model.drafts])
    ranks = serving_group(ctx.tp_group)
    logs = ranks is None or ranks.rank_in_group == 0
    index = _make_index(ctx, config, model)
    max_pinned = ctx.tp_worker.model_runner.token_to_kv_pool_allocator.size * config.pin_max_percent // 100
    now = partial(agreed_time, ranks)
    pins = Pins(index, max_pinned, Series(pin_metrics.METRICS, labels), windows, now=now)
    if ctx.tp_worker.model_runner.lora_manager is not None:
        pins.install(tree)
    publication = Publication(index, model.delimiters, Series(publish.METRICS, labels))
    noted = Faults(
        config.fault_limit,
        Series(faults.METRICS, labels),
        fault_group(ranks),
        shares_passes=ranks is not ctx.tp_group,
    )
    # An audit gives its slots back before pins do.
    counts = Tenants(Series(tenants.METRICS, labels)) if config.tenant_metrics else None
    listed: list[Feature | None] = [host, audit, pins, counts]
    features = Features([each for each in listed if each is not None])
    planning = Planning(
        index,
        config,
        cost=cost,
        max_sequences=model.max_sequences,
        max_keys=model.max_keys,
        max_extend=_max_extend(ctx) if model.drafts else None,
        features=features,
        faults=noted,
        modes=_make_modes(ctx, config),
        host=host,
        windows=windows,
        media=media,
        steps=_steps(ctx, model.splicer),
        series=Series(plan_metrics.METRICS, labels),
    )
    if isinstance(tree, HiCacheTree) and not isinstance(media, Images) and _may_have_store(tree, model, index, ranks):
        tree.store = _make_store(ctx, tree, config, model, publication)
        features.add(tree.store)
    tree.serve_with(
        planning=planning,
        accounting=Accounting(Series(account.METRICS, labels), TrafficLog(features) if logs else None),
        publication=publication,
        faults=noted,
        features=features,
    )
    return tree


def _max_extend(ctx: BuildContext) -> int | None:
    """The most tokens of a batch with splices beside a draft, spliced ones included; None for no limit.

    A draft is given the embeddings of a whole batch with media, which SGLang copies once more: with two chunks that is
    four times a chunk, and stock SGLang's own pass over a full chunk has its embeddings three times.
    """
    chunk = get_schedule().chunked_prefill_size or 0
    return 2 * chunk if ctx.model_config.is_multimodal and chunk > 0 else None


def _make_index(ctx: BuildContext, config: PicConfig, model: _LiveModel) -> ContentIndex:
    return ContentIndex(
        config.core,
        lexicon=model.lexicon,
        names=RowNames(ctx.params.page_size, int(ctx.params.is_eagle)),
        row_lookahead=len(model.drafts),
    )


def _steps(ctx: BuildContext, splicer: Splicer) -> tuple[PositionSteps, ...]:
    """Position boundaries that a shift must not cross: steps of the rotary scaling, and attention chunks."""
    chunk, steps = ctx.model_config.attention_chunk_size, splicer.geometry.steps
    return (*([] if steps is None else [steps]), *([PositionSteps(chunk)] if chunk else []))


def _make_tree(
    ctx: BuildContext, model: _LiveModel, splicer: Splicer
) -> tuple[PicRadixCache, WindowRowsInTree | None, HostTier | None, CostModel | None]:
    """The tree, its window rows and host rows if the server has them, and the costs with the price of a host fetch."""
    window_rows = model.splicer.view.windows
    if window_rows is not None:
        keep_rows()
    kind = HiCacheTree if ctx.enable_hierarchical_cache else PicRadixCache
    tree: PicRadixCache = create_unified_radix_cache(ctx, cache_class=kind)
    windows = None if window_rows is None else WindowRowsInTree(tree, window_rows.slots)
    if not isinstance(tree, HiCacheTree):
        return tree, windows, None, model.cost
    return tree, windows, *_read_host(ctx, tree, splicer, model.drafts, model.cost)


def _read_host(
    ctx: BuildContext, tree: HiCacheTree, splicer: Splicer, drafts: Sequence[Draft], cost: CostModel | None
) -> tuple[HostTier, CostModel | None]:
    """Let splices read rows from HiCache's host pool, and measure what a fetch costs."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    group = tree.cache_controller.mem_pool_host
    host_pool, token_bytes, index_pool = group.anchor_entry.host_pool, group.anchor_entry.host_pool.size_per_token, None
    if splicer.view.index or splicer.view.index_rows:
        index_pool = group.get_pool(PoolName.INDEXER)
        token_bytes += index_pool.size_per_token
    num_slots, window = host_pool.size, None
    if splicer.view.windows is None:
        splicer.bind_host(view_host_pool(host_pool, splicer.view, index_pool))
    else:
        window_pool, window = group.get_pool(PoolName.SWA), tree.swa_retain_window
        token_bytes, num_slots = token_bytes + window_pool.size_per_token, min(num_slots, window_pool.size)
        splicer.bind_host(view_window_host_pools(host_pool, window_pool, splicer.view))
    tree.host = HostTier(tree, token_bytes, window)
    tree.drafts = DraftsOnHost(drafts, ctx.params, group)
    if cost is not None:
        with on_forward_stream(ctx.tp_worker.model_runner):
            fetched_us = calibrate_fetch(splicer, num_slots, ctx.tp_group)
        cost = msgspec.structs.replace(cost, fetched_token_us=max(0.0, fetched_us - cost.spliced_token_us))
    return tree.host, cost


def _may_have_store(tree: HiCacheTree, model: _LiveModel, index: ContentIndex, ranks: TpGroup | None) -> bool:
    """Whether SGLang's keys name every token that a draft's row depends on, and windows have no pool of their own.

    Raises:
        UnsupportedError: a store is attached that would keep one rank's rows of a draft for all ranks.
    """
    view = model.splicer.view
    is_whole = is_stored_whole(model.drafts, view, ranks, has_store=tree.enable_storage)
    return is_whole and len(model.drafts) <= index.names.lookahead and view.windows is None


def _make_store(
    ctx: BuildContext, tree: HiCacheTree, config: PicConfig, model: _LiveModel, publication: Publication
) -> StoreTier:
    """The tier that gives approximate rows their own keys in HiCache's store, which may be attached later."""
    host_pool = tree.cache_controller.mem_pool_host.anchor_entry.host_pool
    models = [(ctx.tp_worker.model_runner, model.splicer), *((draft.runner, draft.splicer) for draft in model.drafts)]
    # NOTE: after start-up only ranks that serve the same requests read the fingerprint at the same time.
    at_start = read_fingerprint(models, host_pool, ctx.tp_group)

    def fingerprint() -> bytes:
        return read_fingerprint(models, host_pool, serving_group(ctx.tp_group)) if tree.num_weights else at_start

    made = StoreTier(tree, fingerprint, policy=msgspec.json.encode(config.core), publication=publication)
    hicache_tree.install(made)
    return made


def _checked_path(
    ctx: BuildContext, audit: Audit | None, labels: dict[str, str] | None
) -> tuple[ForwardPath, list[Draft]]:
    """Hook the forward pass, and check on live rows that the model's and its drafts' rows can be moved."""
    runner = ctx.tp_worker.model_runner
    view = view_pool(runner.token_to_kv_pool)
    geometry = read_geometry(runner.model, max_shift=ctx.model_config.context_len)
    splicer = Splicer(view, geometry)
    drafts = read_drafts(ctx, splicer)
    path = ForwardPath(
        splicer,
        [] if audit is None else [audit_hooks.FirstTokens(audit)],
        draft_splicers=[draft.splicer for draft in drafts],
        series=Series(forward.METRICS, labels),
    )
    path.install()
    if gathers():
        dp_attention.install(path)
    apply_hooks()
    _check_rows(ctx, runner, splicer)
    for draft in drafts:
        with draft.serving():
            _check_rows(ctx, draft.runner, draft.splicer, draft_input=draft.spec_info)
    return path, drafts


def _check_rows(
    ctx: BuildContext, runner: ModelRunner, splicer: Splicer, *, draft_input: DraftInput | None = None
) -> None:
    """Check that rows of the model or of its draft can be moved, and log the measured differences."""
    view, started_at = splicer.view, time.perf_counter()
    rows, gaps = check_rows(runner, splicer, max_sequences(runner), ctx.tp_group, draft_input=draft_input)
    logger.info(
        "sglang_pic: %s, %s pool, %d layers: moved rows differ from computed ones by a relative L2 of %.1e (keys "
        "of the first layer), %.1e (keys of any layer; unmoved %.1e), %.1e (values and latent rows); rows of a gap "
        "batch by %.1e (first layer), and rows after a splice by %.3f of what a wrong splice changes; checked in %.0f "
        "ms",
        "model" if draft_input is None else "draft model",
        view.kind.value,
        view.num_layers,
        rows.first_keys,
        rows.keys,
        rows.unmoved_keys,
        rows.rest,
        gaps.first,
        gaps.unread,
        1e3 * (time.perf_counter() - started_at),
    )
    if view.index_dtype is not None:
        logger.info("sglang_pic: moved index keys differ from computed ones by a relative L2 of %.1e", rows.index_keys)
    if rows.unrotated_layers:
        logger.info(
            "sglang_pic: %d layers use no positions; their keys are moved as they are", len(rows.unrotated_layers)
        )
    if rows.noisy_layers:
        # Only the operator's own prompts can say whether that matters: the self-test measures answers.
        logger.warning(
            "sglang_pic: rows of %d layers, from layer %d on, differ more between positions than those of the tested "
            "models: rounding grows with depth and changes the choice of experts. Splices differ as much.",
            len(rows.noisy_layers),
            rows.noisy_layers[0],
        )


def _labels(ctx: BuildContext) -> dict[str, str] | None:
    """SGLang's rank labels; `None` on all but the first of the ranks that count the same requests."""
    if not ctx.server_args.enable_metrics:
        return None
    ranks = serving_group(ctx.tp_group)
    if ranks is not None and ranks.rank_in_group != 0:
        return None
    dp_rank = get_parallel().dp_rank
    replica = {} if dp_rank is None else {"dp_rank": str(dp_rank)}
    return {"model_name": get_serving().served_model_name, "tp_rank": str(ctx.tp_rank), **replica}
