"""Replaces the parts of SGLang that this platform lacks for DP attention, where ranks gather their tokens.

SGLang takes its CPU branches only where `SGLANG_USE_CPU_ENGINE` asks for its own CPU engine; this platform is another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

_NAP_MS = 5


def install() -> None:
    """Gather without Triton, registered operators and pinned memory, and let no idle rank hold up the others.

    Heads are not made up to a multiple of ranks that do not share them: 9 heads on 2 ranks stay 9.

    Idempotent; for worker processes. Ranks that do not gather lose nothing by it.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper
    from sglang.srt.model_executor import forward_batch_info, model_runner

    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    forward_batch_info._is_cpu = parallel_state._is_cpu = True
    if not hasattr(IdleSleeper.maybe_sleep, "__wrapped__"):
        IdleSleeper.maybe_sleep = _napping(IdleSleeper.maybe_sleep)
    if not hasattr(model_runner.adjust_config_with_unaligned_cpu_tp, "__wrapped__"):
        model_runner.adjust_config_with_unaligned_cpu_tp = _for_sharing(
            model_runner.adjust_config_with_unaligned_cpu_tp
        )


def _napping(sleep: Callable[[Any], None]) -> Callable[[Any], None]:
    """SGLang sleeps for up to a second unless its own rank gets a request; a rank that gathers waits for all others."""
    from sglang.srt.runtime_context import get_parallel

    @wraps(sleep)
    def maybe_sleep(sleeper: Any) -> None:
        if get_parallel().attn_dp_enabled:
            sleeper.poller.poll(_NAP_MS)
        else:
            sleep(sleeper)

    return maybe_sleep


def _for_sharing(pad: Callable[[Any, Any, int], Any]) -> Callable[[Any, Any, int], Any]:
    """On a CPU SGLang pads heads for all tensor-parallel ranks; with DP attention fewer of them share the heads."""
    from sglang.srt.runtime_context import get_parallel

    @wraps(pad)
    def adjust(model_config: Any, load_config: Any, tp_size: int) -> Any:
        parallel = get_parallel()
        return pad(model_config, load_config, parallel.attn_tp_size if parallel.attn_dp_enabled else tp_size)

    return adjust
