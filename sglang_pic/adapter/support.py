"""What the cache cannot serve safely: refused when the server starts, in one line that says what to change.

Owns the table of flags and topologies. Pools and rotary embeddings are refused where they are read, in `runtime`.
"""

from __future__ import annotations

from typing import Any

from sglang_pic.errors import UnsupportedError

__all__ = ["ATTENTION_BACKENDS", "check_support", "max_sequences"]

# Backends whose layers write KV into the pool before attention reads it through the page table, so that virtual
# sequences of one row see each other. Servers are tested with `pic_cpu`, and its attention against `torch_native`'s;
# the others follow the same order by their source and want a GPU to be measured on.
ATTENTION_BACKENDS = ("pic_cpu", "torch_native", "triton", "fa3", "flashinfer")


_WITH_SEQUENCE_TABLES = ("triton", "flashinfer")
"""Backends with tables for as many sequences as the request pool has rows."""
_UNBOUNDED = 1 << 20


def max_sequences(runner: Any) -> int:
    """How many virtual sequences one batch may have, on SGLang's model runner.

    Raises:
        UnsupportedError: too few for a single splice.
    """
    backend, rows = runner.prefill_attention_backend_str, int(runner.req_to_token_pool.size)
    if backend not in _WITH_SEQUENCE_TABLES:
        return _UNBOUNDED
    if rows < 2:
        raise UnsupportedError(
            f"--radix-cache-backend pic does not work with --max-running-requests {rows} on the prefill attention "
            f"backend {backend!r}, whose tables have room for so many gaps: allow 2 or more."
        )
    return rows


def check_support(ctx: Any) -> None:
    """Refuse what would be served wrongly.

    Args:
        ctx: SGLang's `TreeCacheBuildContext`.

    Raises:
        UnsupportedError: naming the flag or the model property and what to change.
    """
    args = ctx.server_args
    for present, what, change in (
        (ctx.disable_radix_cache, "--disable-radix-cache", "remove it"),
        (ctx.is_hybrid_swa, "a model with sliding-window layers", "serve it without --radix-cache-backend pic"),
        (ctx.is_hybrid_ssm, "a model with state-space layers", "serve it without --radix-cache-backend pic"),
        (ctx.is_dsa, "a model with a sparse-attention indexer", "serve it without --radix-cache-backend pic"),
        (ctx.enable_hierarchical_cache, "--enable-hierarchical-cache", "remove it"),
        (args.enable_lmcache, "--enable-lmcache", "remove it"),
        (args.speculative_algorithm is not None, "--speculative-algorithm", "remove it"),
        (args.pp_size > 1, f"--pp-size {args.pp_size}", "use tensor parallelism"),
        (args.enable_dp_attention, "--enable-dp-attention", "remove it"),
        (args.disaggregation_mode != "null", f"--disaggregation-mode {args.disaggregation_mode}", "remove it"),
        (args.enable_two_batch_overlap, "--enable-two-batch-overlap", "remove it"),
        (args.enable_pdmux, "--enable-pdmux", "remove it"),
        (args.dcp_size > 1, f"--dcp-size {args.dcp_size}", "remove it"),
        (args.attn_cp_size > 1, f"--attn-cp-size {args.attn_cp_size}", "remove it"),
        (args.enable_unified_memory, "--enable-unified-memory", "remove it"),
        (args.enable_unified_cache_external_linker, "--enable-unified-cache-external-linker", "remove it"),
        (not ctx.model_config.is_generation, "a model that does not generate", "serve it without the flag"),
        (args.dllm_algorithm is not None, "--dllm-algorithm", "remove it"),
        (args.enable_return_routed_experts, "--enable-return-routed-experts", "remove it"),
        # Answers depend on what is cached, which is what these promise they do not.
        (args.enable_deterministic_inference, "--enable-deterministic-inference", "remove it"),
        (args.rl_on_policy_target is not None, "--rl-on-policy-target", "remove it"),
    ):
        if present:
            raise UnsupportedError(f"--radix-cache-backend pic does not work with {what}: {change}.")
    backend = ctx.tp_worker.model_runner.prefill_attention_backend_str
    if backend not in ATTENTION_BACKENDS:
        raise UnsupportedError(
            f"--radix-cache-backend pic does not work with the prefill attention backend {backend!r}: choose one of "
            f"{', '.join(ATTENTION_BACKENDS)} with --attention-backend."
        )
