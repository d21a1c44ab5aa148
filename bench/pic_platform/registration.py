"""Makes the attention backend known to SGLang; idempotent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from pic_platform import (
    ATTENTION_BACKEND,
    block_sparse,
    gathering,
    host_tier,
    linear_state,
    products,
    sparse_index,
    transfers,
)
from sglang_pic.errors import UnsupportedError

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod


def register_choice() -> None:
    """Let `--attention-backend pic_cpu` pass the parser; light enough for every process."""
    from sglang.srt.arg_groups import choices

    if ATTENTION_BACKEND not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([ATTENTION_BACKEND])
        _serve_what_triton_serves()
        transfers.install()


def _serve_what_triton_serves() -> None:
    """Have SGLang take the backend for `triton` where a model names the backends that have windows and sinks.

    gpt-oss has such a list, which no platform can extend. Where a model has an indexer, SGLang asks CUDA for its device
    and chooses among kernels and dtypes of rows by it: on this platform it chooses nothing.
    """
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    @register_resolution_hook("handle_model_specific_adjustments")
    def adjust(server_args: Any, previous: Callable[[Any], None]) -> None:
        import torch
        from sglang.srt.arg_groups import model_hook
        from sglang.srt.arg_groups.overrides import resolving_view

        asked = model_hook.attention_backends_of

        def answer(config: Any) -> tuple[str, ...]:
            return tuple("triton" if name == ATTENTION_BACKEND else name for name in asked(config))

        def choose_nothing(_server_args: Any) -> dict[str, object]:
            return {}

        with ExitStack() as stack:
            stack.enter_context(_replaced(model_hook, "attention_backends_of", answer))
            # `sglang-pic doctor` resolves servers of other machines.
            if resolving_view(server_args).device == "cpu":
                stack.enter_context(_replaced(torch.cuda, "get_device_capability", lambda: (0, 0)))
                for name in ("_dsa_kv_cache_dtype_default", "_dsa_split_backend_resolution"):
                    stack.enter_context(_replaced(model_hook, name, choose_nothing))
            previous(server_args)


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def register_backend() -> None:
    """Let a model runner build the backend by its name; for worker processes."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(ATTENTION_BACKEND)(_create_backend)
    gathering.install()
    host_tier.install()
    products.install()
    sparse_index.install()
    block_sparse.allow_pool()


def _create_backend(runner: ModelRunner) -> AttentionBackend:
    from sglang.srt.configs.model_config import is_minimax_sparse
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state

    from pic_platform.attention_backend import CpuAttentionBackend

    if runner.use_mla_backend:
        _register_latent_method()
    if is_minimax_sparse(runner.model_config.hf_config):
        block_sparse.install()
    if runner.model_config.hf_config.architectures == ["Qwen3NextForCausalLM"]:
        linear_state.install()
    elif uses_ssm_state(runner.model_config):
        raise UnsupportedError(
            f"{runner.model_config.hf_config.architectures}: of models with recurrent state the platform serves "
            "Qwen3NextForCausalLM; use a machine with an accelerator."
        )
    return CpuAttentionBackend(runner)


def _register_latent_method() -> None:
    """Keep DeepSeek models on the absorbed form, the only one that reads the latent rows as they lie in the pool.

    For an unknown backend SGLang takes Triton's rule, which computes keys and values where there is no prefix.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    def choose_absorbed(_attention: object, _forward_batch: object) -> AttnForwardMethod:
        return AttnForwardMethod.MLA

    AttentionBackendRegistry.register(ATTENTION_BACKEND, choose_absorbed)
