"""Makes the attention backend known to SGLang; idempotent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_pic.platform import ATTENTION_BACKEND, gathering, host_tier

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


def _serve_what_triton_serves() -> None:
    """Have SGLang take the backend for `triton` where a model names the backends that have windows and sinks.

    gpt-oss has such a list, which no platform can extend.
    """
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    @register_resolution_hook("handle_model_specific_adjustments")
    def adjust(server_args: Any, previous: Callable[[Any], None]) -> None:
        from sglang.srt.arg_groups import model_hook

        asked = model_hook.attention_backends_of

        def answer(config: Any) -> tuple[str, ...]:
            return tuple("triton" if name == ATTENTION_BACKEND else name for name in asked(config))

        model_hook.attention_backends_of = answer
        try:
            previous(server_args)
        finally:
            model_hook.attention_backends_of = asked


def register_backend() -> None:
    """Let a model runner build the backend by its name; for worker processes."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(ATTENTION_BACKEND)(_create_backend)
    gathering.install()
    host_tier.install()


def _create_backend(runner: ModelRunner) -> AttentionBackend:
    from sglang_pic.platform.attention_backend import CpuAttentionBackend

    if runner.use_mla_backend:
        _register_latent_method()
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
