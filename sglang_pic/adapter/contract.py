"""The contract: every symbol of SGLang that this adapter relies on, and what it must look like.

Checked before anything is registered. SGLang swallows the exceptions of plugins, so a half-registered plugin would
serve without its cache and say nothing; a missing or changed symbol must stop the server with one line instead.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from sglang_pic.errors import ContractError

__all__ = ["BUILT_FOR", "CONTRACT", "Symbol", "check_contract"]

BUILT_FOR = "0.5.23"


class Symbol(NamedTuple):
    """One symbol: where it is, which parameters we pass or receive, and why we need it.

    `source_has` names words that its source must hold, for attributes which only instances have.
    """

    path: str
    parameters: tuple[str, ...] = ()
    source_has: tuple[str, ...] = ()
    why: str = ""


_SRT = "sglang.srt"
_CACHE = f"{_SRT}.mem_cache.unified_radix_cache.UnifiedRadixCache"
_ADDER = f"{_SRT}.managers.schedule_policy.PrefillAdder"
_SCHEDULER = f"{_SRT}.managers.scheduler.Scheduler"
_WEIGHTS = f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATES = f"{_SRT}.managers.scheduler_components.internal_state.SchedulerInternalStateController"

CONTRACT: tuple[Symbol, ...] = (
    # Registration.
    Symbol(f"{_SRT}.mem_cache.registry.register_radix_cache_backend", ("name", "factory"), why="the backend's name"),
    Symbol(f"{_SRT}.mem_cache.registry.create_unified_radix_cache", ("ctx", "cache_class"), why="builds the tree"),
    Symbol(f"{_SRT}.plugins.hook_registry.HookRegistry.register", ("target", "hook", "hook_type"), why="hooks"),
    Symbol(f"{_SRT}.plugins.hook_registry.HookRegistry.apply_hooks", why="hooks"),
    # The tree.
    Symbol(f"{_CACHE}.match_prefix", ("params",), why="donors are matched again"),
    Symbol(f"{_CACHE}.insert", ("params",), why="what the tree adopted"),
    Symbol(f"{_CACHE}.checkpoint_into_tree", ("req", "up_to"), ("self.insert(insert_params)",), why="publication"),
    Symbol(f"{_CACHE}.on_release", ("req", "checkpointed"), why="the end of a row"),
    Symbol(f"{_CACHE}.reset", why="flush"),
    Symbol(f"{_CACHE}.lock", ("node_id",), why="donors stay until copied"),
    Symbol(f"{_CACHE}.unlock", ("lock",), why="donors stay until copied"),
    Symbol(f"{_CACHE}.path_device_indices", ("node",), why="slots of a donor"),
    Symbol(f"{_SRT}.mem_cache.base_prefix_cache.MatchPrefixParams", ("key", "req"), why="donors are matched again"),
    Symbol(f"{_SRT}.mem_cache.base_prefix_cache.zero_match_result", ("tree_cache", "match_result", "extra_key")),
    Symbol(f"{_SRT}.mem_cache.radix_cache.RadixKey", ("token_ids", "extra_key", "cache_salt"), why="paths"),
    # Requests.
    Symbol(
        f"{_SRT}.managers.schedule_batch.Req.__init__",
        ("sampling_params",),
        (
            "self.extra_key",
            "self.cached_tokens",
            "self.cache_salt",
            "self.lora_id",
            "self.sampling_params",
            "self.full_untruncated_fill_ids",
            "self.input_embeds",
            "self.multi_item_delimiter_indices",
            "self.retracted_stain",
            "self.session",
            "self.positional_embed_overrides",
            "self.return_hidden_states",
            "self.token_indices_to_pool",
        ),
        why="options and namespace",
    ),
    # Admission.
    Symbol(f"{_SRT}.managers.scheduler.Scheduler.get_prefill_adder_class", why="our adder"),
    Symbol(f"{_ADDER}.add_one_req", ("req", "has_chunked_req", "truncation_align_size"), why="planning"),
    Symbol(f"{_ADDER}.add_chunked_req", ("req",), ("self.rem_chunk_tokens", "req.extend_end"), why="chunked prefill"),
    Symbol(
        f"{_ADDER}._select_prefill_admission", ("req",), ("self.rem_chunk_tokens", "_PrefillAdmission("), why="budgets"
    ),
    Symbol(f"{_ADDER}.cur_rem_tokens", (), ("self.memory_budget.remaining_current",), why="slots of a longer chunk"),
    Symbol(f"{_ADDER}.ceil_paged_tokens", ("tokens",), why="slots of a longer chunk"),
    Symbol(f"{_ADDER}._commit_prefill_admission", ("req", "admission", "mamba_gap_reserve"), why="budgets"),
    Symbol(
        f"{_ADDER}._update_prefill_budget",
        (),
        ("self.rem_input_tokens -=", "self.rem_chunk_tokens -=", "self.log_hit_tokens +=", "self.log_input_tokens +="),
        why="budgets",
    ),
    Symbol(
        f"{_ADDER}.__init__",
        ("tree_cache", "num_mixed_decode_tokens"),
        ("self.new_chunked_req", "self.can_run_list"),
        why="sequences of a batch",
    ),
    # The forward path.
    Symbol(
        f"{_SRT}.model_executor.forward_batch_info.ForwardBatch.init_new",
        ("batch", "model_runner"),
        ("own_plan(ret)", "kv_loc_plan.bind(", "ret.extend_start_loc", "ret.extend_logprob_start_lens_cpu"),
        why="where a batch gets its splices",
    ),
    Symbol(f"{_SRT}.model_executor.model_runner.ModelRunner.forward", ("forward_batch",), why="splice and compute"),
    Symbol(
        f"{_SRT}.model_executor.model_runner.ModelRunner._forward_raw",
        (),
        ("self.prefill_cuda_graph_runner is not None", "self.eager_runner.execute("),
        why="a gap batch runs eagerly",
    ),
    Symbol(
        f"{_SRT}.layers.logits_processor.LogitsMetadata.from_forward_batch",
        ("forward_batch",),
        ("extend_seq_lens_cpu", "extend_logprob_start_lens_cpu"),
        why="the last row of each request",
    ),
    Symbol(
        f"{_SRT}.layers.logits_processor.LogitsProcessor._get_logits",
        ("hidden_states", "lm_head", "logits_metadata"),
        why="what a server under test records",
    ),
    Symbol(
        f"{_SRT}.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method",
        ("forward_batch",),
        why="absorbed MLA for a gap batch",
    ),
    Symbol(
        f"{_SRT}.models.deepseek_common.attention_forward_methods.forward_methods.AttnForwardMethod.MLA",
        why="absorbed MLA for a gap batch",
    ),
    Symbol(f"{_SRT}.mem_cache.kv_loc_plan.KVLocPlan.bind", ("batch", "reader"), why="write slots of a gap batch"),
    Symbol(
        f"{_SRT}.mem_cache.kv_index_translator.KVIndexTranslator.own_plan",
        ("forward_batch",),
        why="write slots of a gap batch",
    ),
    Symbol(f"{_SRT}.environ.Envs.SGLANG_EAGER_INPUT_NO_COPY", why="a gap batch has more sequences than requests"),
    # Passes that belong to no request.
    Symbol(
        f"{_SRT}.model_executor.model_runner.ModelRunner.__init__",
        (),
        ("self.lora_manager:", "self.shared_read_done_event:"),
        why="passes of no request",
    ),
    Symbol(f"{_SRT}.lora.lora_manager.LoRAManager.prepare_lora_batch", ("forward_batch",), why="passes of no request"),
    Symbol(
        f"{_SCHEDULER}._apply_war_barrier", (), ("runner.shared_read_done_event = None",), why="passes of no request"
    ),
    # The audit: its moments, its slots, its switch.
    Symbol(
        f"{_SCHEDULER}.on_idle", (), ("self.is_fully_idle()", "self.maybe_sleep_on_idle()"), why="when an audit may run"
    ),
    Symbol(f"{_SCHEDULER}.is_fully_idle", why="when an audit may run"),
    Symbol(f"{_SCHEDULER}.maybe_sleep_on_idle", why="when an audit may run"),
    Symbol(f"{_SCHEDULER}.process_batch_result", ("batch", "result"), why="when an audit may run"),
    Symbol(
        f"{_SCHEDULER}.run_batch",
        (),
        ("with self.forward_stream_ctx", "self.forward_stream.wait_stream(self.schedule_stream)"),
        why="the stream of an audit",
    ),
    Symbol(
        f"{_SCHEDULER}.event_loop_overlap",
        (),
        ("self.result_queue.append((batch.copy(), batch_result))", "self.launch_batch_sample_if_needed("),
        why="no audit between a pass and its sampling",
    ),
    Symbol(
        f"{_SCHEDULER}.launch_batch_sample_if_needed",
        (),
        ("batch_result.delay_sample_func is None",),
        why="no audit between a pass and its sampling",
    ),
    Symbol(f"{_SCHEDULER}.record_weight_version_change", why="audits of other weights"),
    Symbol(f"{_WEIGHTS}.begin_weight_update", why="audits of other weights"),
    Symbol(f"{_WEIGHTS}.end_weight_update", why="audits of other weights"),
    Symbol(
        f"{_WEIGHTS}.release_memory_occupation", ("recv_req",), ("self.is_fully_idle(",), why="audits of no weights"
    ),
    Symbol(f"{_SRT}.mem_cache.common.evict_from_tree_cache", ("tree_cache", "num_tokens"), why="slots of an audit"),
    Symbol(f"{_CACHE}.evictable_size", why="slots of an audit"),
    Symbol(f"{_CACHE}.evict_for_alloc", ("params",), ("EvictResult", "num_tokens_evicted"), why="slots of an audit"),
    Symbol(f"{_SRT}.mem_cache.prefill_budget.PrefillBudget", (), ("self.tree_cache.evictable_size()",), why="slots"),
    Symbol(f"{_UPDATES}._update_handlers", (), ("_UpdateHandler(",), why="switching a namespace on again"),
    Symbol(f"{_UPDATES}.set_internal_state", (), ("handler.validate(key, value)",), why="switching a namespace on"),
    # What users see.
    Symbol(
        f"{_SRT}.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.get_cached_tokens_details",
        ("req",),
        why="chunk hits in responses",
    ),
    Symbol(
        f"{_SRT}.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        ("obj", "input_ids"),
        why="HTTP 400 for bad options",
    ),
    Symbol(
        f"{_SRT}.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        ("recv_req",),
        ("GetInternalStateReqOutput(internal_state=",),
        why="our entry in /server_info",
    ),
    Symbol(f"{_SRT}.entrypoints.openai.protocol.CachedTokensDetails", why="chunk hits in responses"),
    Symbol(f"{_SRT}.entrypoints.openai.utils.cached_tokens_details_from_dict", ("details",), why="chunk hits"),
)


def check_contract(contract: tuple[Symbol, ...] = CONTRACT) -> None:
    """Check every symbol against the installed SGLang.

    Raises:
        ContractError: one line that names the first symbol that is missing or changed, and the versions.
    """
    try:
        for symbol in contract:
            problem = _problem(symbol)
            if problem:
                raise ContractError(
                    f"{symbol.path} {problem} in the installed SGLang {_installed_version()}; sglang_pic was built for "
                    f"{BUILT_FOR} and needs it ({symbol.why or 'see adapter/contract.py'}). Install "
                    f"sglang=={BUILT_FOR}, or start without --radix-cache-backend pic."
                )
    finally:
        # Syntax trees of SGLang's largest files: needed once, and every process of a server would keep them.
        _parse.cache_clear()


def _problem(symbol: Symbol) -> str | None:
    found = _find(symbol.path)
    if found is None:
        return "is missing"
    node, source = found
    if symbol.parameters:
        known = _parameters(node)
        lacking = [name for name in symbol.parameters if name not in known]
        if lacking:
            return f"has no parameter {lacking[0]!r}"
    lacking = [word for word in symbol.source_has if word not in source]
    if lacking:
        return f"no longer has {lacking[0]!r}"
    return None


def _find(path: str) -> tuple[ast.AST, str] | None:
    """The definition of a dotted path and its source, without importing the module it is in.

    NOTE: importing every module here would add seconds to each process of a server.
    """
    parts = path.split(".")
    for split in range(len(parts) - 1, 1, -1):
        module = _parse(".".join(parts[:split]))
        if module is not None:
            tree, lines = module
            node: ast.Module | ast.stmt = tree
            for name in parts[split:]:
                member = _member(node, name)
                if member is None:
                    return None
                node = member
            assert isinstance(node, ast.stmt), "a path names more than a module"
            # ast.get_source_segment would go through the whole file, character by character, for every symbol.
            return node, "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return None


@functools.cache
def _parse(module: str) -> tuple[ast.Module, list[str]] | None:
    # Looking a submodule up by name would import its parent packages.
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in (Path(folder, *rest).with_suffix(".py"), Path(folder, *rest, "__init__.py")):
            if file.is_file():
                text = file.read_text(encoding="utf8")
                return ast.parse(text), text.split("\n")
    return None


def _member(node: ast.AST, name: str) -> ast.stmt | None:
    child: ast.stmt
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name == name:
            return child
        targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return child
    return None


def _parameters(node: ast.AST) -> set[str]:
    """Parameters of a function, or the fields of a class that is made from its annotations."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        return {arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    init = _member(node, "__init__")
    if init is not None:
        return _parameters(init)
    fields = (child.target for child in getattr(node, "body", ()) if isinstance(child, ast.AnnAssign))
    return {target.id for target in fields if isinstance(target, ast.Name)}


def _installed_version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "(not installed)"
