"""The hooks of experiments: on SGLang's dummy weights and tree factory, on our serving path, index and cache."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pic_bench.probe_plugin import PROBE_VARIABLE
from pic_bench.probe_plugin.options import ProbeConfig, ProbeReport, load, parse_probed, probe_of
from sglang_pic.adapter.sglang.contract import Symbol, check_contract
from sglang_pic.errors import PicError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits"
_CREATE = "sglang.srt.mem_cache.registry.create_tree_cache"
_DUMMY = "sglang.srt.model_loader.loader.initialize_dummy_weights"
_CONTRACT = (
    Symbol(_LOGITS, ("hidden_states", "lm_head", "logits_metadata"), why="what is recorded"),
    Symbol(_CREATE, ("ctx",), ("get_radix_cache_factory(",), why="the moment to hook the serving path"),
)
_SERVE = "sglang_pic.adapter.serve"
_PATH, _CACHE = f"{_SERVE}.forward.ForwardPath", f"{_SERVE}.tree.PicRadixCache"
# Of SGLang's dummy weights, uniform in [-1e-3, 1e-3).
_DUMMY_STD = 1e-3 / 3**0.5
_GAINS = {"q_proj": 2.0, "k_proj": 2.0, "qkv_proj": 2.0, "kv_a_proj": 2.0, "lm_head": 3.0}


def install() -> None:
    """Register the hooks that `SGLANG_PIC_PROBE` asks for.

    Raises:
        SystemExit: the variable is wrong, or SGLang is not what this version was built for.
    """
    try:
        config = load()
        check_contract(_CONTRACT)
    except PicError as error:
        raise SystemExit(f"sglang_pic: {error}") from error
    if config.request_options:
        _hook("AROUND", f"{_SERVE}.options.parse_options", parse_probed)
    if config.sharp_dummy:
        _hook("AFTER", _DUMMY, _sharpen)
    _hook("BEFORE", _CREATE, partial(_hook_scheduler, config))


def _hook(kind: str, target: str, hook: Callable[..., Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType[kind])


def _hook_scheduler(config: ProbeConfig, ctx: Any) -> None:
    """Hook the serving path in a scheduler that makes our cache.

    NOTE: here and not in `register`, because a hook imports what it wraps, and most of a server's processes have no use
    for the serving path.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    if ctx.server_args.radix_cache_backend != "pic":
        return
    if config.request_options:
        faults = _Faults()
        _hook("AROUND", f"{_SERVE}.planning.Planning.plan", _plan)
        _hook("AFTER", f"{_PATH}.lay_out", faults.lay_out)
        _hook("AFTER", f"{_PATH}.move_rows", faults.move_rows)
    if config.sync_debug:
        _hook("BEFORE", f"{_PATH}.lay_out", _warn_of_waits)
    if config.replay_lora:
        from sglang_pic.adapter.serve import prefill_path

        prefill_path.REPLAYS_LORA = True
    passes = Counter[bool]()
    _hook("AFTER", f"{_PATH}._compute_gaps", partial(_count, passes))
    # Ranks compute the same logits, so only the first one records.
    if config.record_dir is not None and ctx.tp_rank == 0:
        _hook("BEFORE", f"{_PATH}.__init__", partial(_add_recorder, Path(config.record_dir)))
    if config.ignore_prefix:
        _hook("AROUND", f"{_CACHE}.match_prefix", _ignore_prefix)
    if config.check_invariants:
        _hook("AFTER", "sglang_pic.core.index.ContentIndex._publish", _check_invariants)
    if config.watch_rows:
        _watch_rows(ctx.tp_worker)
    _hook(
        "BEFORE", "sglang_pic.adapter.server_info.install", partial(_show, config, ctx.tp_worker.model_runner, passes)
    )
    HookRegistry.apply_hooks()
    switches = ", ".join(config.names_on) or "nothing"
    logger.warning("sglang_pic: this server is for experiments only: %s switches on %s", PROBE_VARIABLE, switches)


def _count(
    passes: Counter[bool],
    output: Any,
    _path: object,
    _compute: object,
    _runner: object,
    _batch: object,
    planned: Any,
    *_: Any,
) -> None:
    """After a gap pass: whether a captured graph replayed it; those of start-up and of drafts do not count."""
    if not (planned.is_trial or planned.of_draft):
        passes[output.can_run_graph] += 1


def _show(
    config: ProbeConfig, runner: Any, passes: Counter[bool], _served: object, parts: dict[str, Any], *_: object
) -> None:
    """Before the plugin shows its part of `/server_info`."""
    pool = runner.req_to_token_pool
    parts["probe"] = lambda: ProbeReport(
        switches=config,
        is_idle=len(pool.free_slots) == pool.size,
        num_gap_passes=passes.total(),
        num_replayed=passes[True],
    )


def _plan(original: Callable[..., None], planning: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """Plan under the key of the donors' namespace; publication and the tree see the request's own."""
    probe, own = probe_of(req), (req.extra_key, req.pic.base)
    if probe.donors_from is not None:
        req.extra_key, req.pic.base = probe.donors_from, None
    try:
        original(planning, req, *args, **kwargs)
    finally:
        req.extra_key, req.pic.base = own
    if probe.unlock_donors and req.pic.pending is not None:
        req.pic.pending.locks.close()


def _watch_rows(worker: Any) -> None:
    """Watch the rows of a scheduler."""
    from pic_bench.probe_plugin.accounting import Accountant
    from pic_bench.probe_plugin.row_watch import RowWatch
    from sglang_pic.adapter.startup.draft_workers import drafts_of
    from sglang_pic.runtime.live_pools import view_pool

    runner: Any = worker.model_runner
    drafts = [each for draft in drafts_of(worker) for each in getattr(draft, "draft_runner_list", [draft.draft_runner])]
    watch = RowWatch(
        view_pool(runner.token_to_kv_pool), runner, [(each, view_pool(each.token_to_kv_pool)) for each in drafts]
    )
    keeper = Accountant(runner, watch)
    kind = type(runner.token_to_kv_pool_allocator)
    allocator, tree = f"{kind.__module__}.{kind.__name__}", "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
    for name in ("alloc", "alloc_extend", "alloc_decode"):
        if hasattr(kind, name):
            _hook("AFTER", f"{allocator}.{name}", watch.on_alloc)
    _hook("AFTER", f"{allocator}.clear", watch.on_clear)
    _hook("AFTER", f"{_PATH}.lay_out", watch.lay_out)
    _hook("AFTER", f"{_PATH}._prepare", watch.prepare)
    _hook("AROUND", f"{_PATH}._forward", watch.forward)
    _hook("AROUND", f"{_PATH}.move_rows", watch.move_rows)
    engine = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine"
    _hook("AROUND", f"{engine}.submit_device_to_host", partial(watch.copied, to_host=True))
    _hook("AROUND", f"{engine}.submit_host_to_device", partial(watch.copied, to_host=False))
    controller = "sglang.srt.managers.cache_controller.HiCacheController"
    _hook("AROUND", f"{controller}._generic_page_set", watch.stored)
    _hook("AROUND", f"{controller}._generic_page_get", watch.read_back)
    _hook("AFTER", f"{_CACHE}.__init__", keeper.on_tree)
    _hook("AFTER", f"{_CACHE}.reset", keeper.on_reset)
    _hook("AFTER", f"{tree}.lock", keeper.on_lock)
    _hook("BEFORE", f"{tree}.unlock", keeper.on_unlock)
    _hook("AFTER", f"{tree}._evict", keeper.on_evict)
    _hook("BEFORE", "sglang_pic.adapter.server_info.install", keeper.add_part)


class _Faults:
    """Splices that are wrong on purpose."""

    def __init__(self) -> None:
        self._flipped: list[torch.Tensor] = []
        """Slots of the next splice's rows that are corrupted."""

    def lay_out(self, gap: Any, _path: Any, plans: Any, batch: Any, *_: object) -> None:
        """Each request's rows are one part of the batch's splice, in order."""
        self._flipped = []
        at = 0
        if gap.reads.fetch is not None and len(batch.reqs) == 1 and probe_of(batch.reqs[0]).flip_donors:
            self._flipped.append(gap.reads.fetch.dst)
        for req, plan in zip(batch.reqs, plans, strict=True):
            end = at + (0 if plan is None else plan.plan.num_spliced)
            probe = probe_of(req)
            if not probe.rotate:
                gap.reads.splice.shifts[at:end] = 0
            if probe.flip_donors:
                self._flipped.append(gap.reads.splice.dst[at:end])
            at = end

    def move_rows(self, _result: None, path: Any, _gap: Any) -> None:
        """Every number of the rows changes its sign."""
        import torch

        view = path.splicer.view
        if self._flipped:
            for buffer, at in view.places(torch.cat(self._flipped).unique()):
                # In float32, because torch cannot negate FP8.
                buffer[at] = (-buffer[at].float()).to(buffer.dtype)
        self._flipped = []


def _add_recorder(folder: Path, _path: object, _splicer: object, features: Any, *_: object) -> None:
    from pic_bench.probe_plugin.recorder import Recorder

    recorder = Recorder(folder)
    _hook("AFTER", _LOGITS, recorder.keep)
    features.append(recorder)


def _sharpen(_result: None, model: Any, *_args: object, **_kwargs: object) -> None:
    """Uniform numbers of the standard deviation that a matrix needs to keep its input's; ones in the place of vectors.

    Queries and keys are wider, so that attention chooses, and so is the head, so that some tokens are likely.
    """
    import torch

    for name, weight in model.named_parameters():
        if not weight.is_floating_point():
            continue
        with torch.no_grad():
            if weight.dim() < 2:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
            fan_in = 1 if "embed_tokens" in name else weight.shape[-1]
            weight.mul_(gain * fan_in**-0.5 / _DUMMY_STD)


def _warn_of_waits(*_args: object, **_kwargs: object) -> None:
    """What start-up waits for is not the serving path's, so the first gap batch switches it on; on a CPU nothing."""
    import torch

    if torch.cuda.is_available() and not torch.cuda.get_sync_debug_mode():
        warnings.filterwarnings("default", message="called a synchronizing")
        torch.cuda.set_sync_debug_mode("warn")
        # A wait on purpose: whoever reads the log sees that warnings arrive.
        torch.ones(1, device="cuda").item()


def _ignore_prefix(original: Callable[..., Any], cache: Any, params: Any) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import zero_match_result

    from sglang_pic.adapter.serve.state import is_apart

    result = original(cache, params)
    if params.req is None or is_apart(params.req):
        return result
    return zero_match_result(cache, result, extra_key=params.req.extra_key)


def _check_invariants(_result: None, index: Any, *_args: object, **_kwargs: object) -> None:
    from pic_bench.probe_plugin.invariants import check

    check(index)
