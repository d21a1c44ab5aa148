"""Builds the cache in a scheduler process, when SGLang asks for the backend `pic`.

This runs before the first request. Any exception stops the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel

from sglang_pic.adapter import server_info, support
from sglang_pic.adapter.features import disaggregation, dp_attention, images, prefix_only
from sglang_pic.adapter.features.audit import audit_hooks as audit
from sglang_pic.adapter.features.hicache.hicache_tree import HiCacheTree
from sglang_pic.adapter.features.hicache.host_tier import HostTier
from sglang_pic.adapter.features.hicache.store import HiCacheStore
from sglang_pic.adapter.features.parts import Parts
from sglang_pic.adapter.features.pins import Pins
from sglang_pic.adapter.features.tenants import Tenants
from sglang_pic.adapter.features.window_rows import WindowTier, keep_rows
from sglang_pic.adapter.metrics import Series
from sglang_pic.adapter.probe.extend import on_forward_stream
from sglang_pic.adapter.probe.ranks import metric_labels, serving_group
from sglang_pic.adapter.serve import forward, modes, receive, second_pass
from sglang_pic.adapter.serve.admission import Admission
from sglang_pic.adapter.serve.feature import Feature
from sglang_pic.adapter.serve.forward import ForwardPath
from sglang_pic.adapter.serve.modes import Modes
from sglang_pic.adapter.serve.options import Mode
from sglang_pic.adapter.serve.planning import Planning
from sglang_pic.adapter.serve.rows import ON_DEVICE, RowTier
from sglang_pic.adapter.serve.stations import Stations
from sglang_pic.adapter.serve.tree import PicRadixCache
from sglang_pic.adapter.sglang.hooks import apply_hooks
from sglang_pic.adapter.sglang.seams import BuildContext
from sglang_pic.adapter.startup.asking_layers import find_layers, make_second_pass
from sglang_pic.adapter.startup.calibration import read_costs
from sglang_pic.adapter.startup.certified import certify
from sglang_pic.adapter.startup.drafts import check_drafts
from sglang_pic.adapter.startup.live_model import read_live_model
from sglang_pic.adapter.startup.row_check import check_live_rows
from sglang_pic.adapter.startup.self_test import check_answers
from sglang_pic.config import PicConfig, load_config
from sglang_pic.core import ContentIndex, RowNames, load_loops

logger = logging.getLogger(__name__)

FEATURES: Final[Sequence[Callable[[BuildContext, Parts], Feature | None]]] = (
    dp_attention.make,
    HostTier.make,
    audit.make,  # Before pins, because it gives its slots back first.
    Pins.make,
    Tenants.make,
    HiCacheStore.make,
    disaggregation.make_sender,
)
"""In the order in which they are called."""


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
    config, labels = load_config(), metric_labels(ctx)
    if reason := support.prefix_only(ctx):
        off = Modes(config, Mode.OFF)
        return prefix_only.create_cache(ctx, config, reason, off, labels)
    support.check_support(ctx)
    support.warn_of_changes(ctx, [*changed_bodies, *support.check_features(ctx)])
    if support.disaggregation_mode(ctx) == "decode":
        asked = Modes(config, support.default_mode(ctx), Series(modes.METRICS, labels))
        return disaggregation.create_decode_cache(ctx, config.core, asked)
    parts = _make_parts(ctx, config, labels)
    for make in FEATURES:
        if (made := make(ctx, parts)) is not None:
            parts.stations.features.append(made)
    _serve(ctx, parts)
    return parts.tree


def _make_parts(ctx: BuildContext, config: PicConfig, labels: Mapping[str, str] | None) -> Parts:
    """The live model, checked and measured, what stations share, and the tree."""
    live, ranks = read_live_model(ctx, config), serving_group(ctx.tp_group)
    names = RowNames(ctx.params.page_size, int(ctx.params.is_eagle))
    stations = Stations(
        config,
        ContentIndex(config.core, lexicon=live.lexicon, names=names, row_lookahead=len(live.drafts)),
        live.delimiters,
        Modes(config, support.default_mode(ctx), Series(modes.METRICS, labels)),
        images.make(ctx, [draft.runner.model for draft in live.drafts]),
        labels=labels,
        ranks=ranks,
        shares_passes=ranks is not ctx.tp_group,
    )
    splicers, series = [draft.splicer for draft in live.drafts], stations.series(forward.METRICS)
    path = ForwardPath(live.splicer, stations.features, stations.recovery, splicers, series)
    path.install()
    second = None
    if config.core.reordered == "attend":
        path.second = second = make_second_pass(ctx, live, stations, stations.series(second_pass.METRICS))
        second.install()
    apply_hooks()
    with on_forward_stream(live.runner):
        check_live_rows(ctx, live.runner, live.splicer)
        check_drafts(ctx, live.drafts)
        if second is not None:
            find_layers(live, second)
        cost = read_costs(ctx, config, live)
    load_loops()  # No request waits for the compiler.
    keep_rows(live.splicer.view)
    kind = HiCacheTree if ctx.enable_hierarchical_cache else PicRadixCache
    tree: PicRadixCache = create_unified_radix_cache(ctx, cache_class=partial(kind, stations))
    return Parts(live, cost, stations, path, tree)


def _serve(ctx: BuildContext, parts: Parts) -> None:
    """Plan with the rows that features found, test that on the live model, and hook the scheduler."""
    live, stations, config = parts.live, parts.stations, parts.stations.config
    certificate = certify(ctx, config, live.splicer, stations.labels)
    host = next((each for each in stations.features if isinstance(each, RowTier)), ON_DEVICE)
    tier = WindowTier.make(parts.tree, live.splicer.view, host)
    cost = None if parts.cost is None else tier.priced(parts.cost)
    planned = Planning(stations, live.limits, cost, tier)
    tested = check_answers(ctx, config, live, planned.max_gaps, stations.labels)
    reports: dict[str, Callable[[], msgspec.Struct]] = {
        "faults": stations.faults.report,
        "modes": stations.modes.report,
        "index": stations.publication.report,
        "self_test": lambda: tested,
    }
    if certificate is not None:
        reports["certificate"] = lambda: certificate
    server_info.install(config, reports, stations.features.reports, get_parallel().dp_rank)
    receive.install(parts.tree, Admission(planned, stations), config.core)
    # NOTE: SGLang wraps a target only once, so hooks that share one are registered before all are applied.
    apply_hooks()
    logger.info(
        "sglang_pic: %d delimiters, cost %s, config %s",
        len(live.delimiters),
        "off" if cost is None else msgspec.json.encode(cost).decode(),
        msgspec.json.encode(config.without_secrets()).decode(),
    )
