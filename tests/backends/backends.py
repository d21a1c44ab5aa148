"""SGLang's production attention backends on a machine without their kernels.

The classes are SGLang's own, with their metadata and their writes; only the innermost kernel is `kernels.py`'s, or
runs in Triton's interpreter. To be imported in a process of its own: stand-in modules and `TRITON_INTERPRET=1` would
mislead other tests.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final
from unittest import mock

from torch.overrides import TorchFunctionMode

from tests.backends import kernels

_ATTENTION = "sglang.srt.layers.attention"


class OnCpu(TorchFunctionMode):
    """Tensors that SGLang's code asks for on `cuda`, or in pinned memory, are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)


def make(name: str, runner: Any) -> Any:
    runner.prefill_attention_backend_str = runner.decode_attention_backend_str = name.partition("@")[0]
    with OnCpu():
        backend = BACKENDS[name](runner)
    runner.attn_backend = backend
    return backend


def _flash_attention(runner: Any, version: int, capability: tuple[int, int]) -> Any:
    stand_in_sgl_kernel()
    module = importlib.import_module(f"{_ATTENTION}.flashattention_backend")
    importlib.import_module("sglang.kernels.ops.attention.flash_attention_v3")._is_fa3_supported = lambda *_: True
    with mock.patch.object(module, "get_device_capability", return_value=capability):
        return module.FlashAttentionBackend(runner, fa_impl_ver=version)


def stand_in_sgl_kernel() -> None:
    """Modules with what the backends `fa3` and `fa4` import of them."""
    if "sgl_kernel" in sys.modules:
        return
    package, flash_attn = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    package.__path__ = []
    package.merge_state_v2 = None  # type: ignore[attr-defined]
    flash_attn.flash_attn_with_kvcache = kernels.flash_attn_with_kvcache  # type: ignore[attr-defined]
    flash_attn.flash_attn_varlen_func = kernels.flash_attn_varlen_func  # type: ignore[attr-defined]
    flash_attn.get_scheduler_metadata = lambda **_: None  # type: ignore[attr-defined]
    fourth = "sglang.kernels.ops.attention.flash_attention_v4"
    sys.modules |= {"sgl_kernel": package, "sgl_kernel.flash_attn": flash_attn, fourth: flash_attn}


def _flashinfer_module() -> Any:
    module: Any = importlib.import_module(f"{_ATTENTION}.flashinfer_backend")
    module.BatchPrefillWithPagedKVCacheWrapper = kernels.PagedPrefill
    module.BatchPrefillWithRaggedKVCacheWrapper = kernels.Wrapper
    module.BatchDecodeWithPagedKVCacheWrapper = kernels.PagedDecode
    module.fast_decode_plan = None
    return module


def _flashinfer_mla(runner: Any) -> Any:
    module: Any = importlib.import_module(f"{_ATTENTION}.flashinfer_mla_backend")
    module.BatchMLAPagedAttentionWrapper = kernels.PagedMla
    module.BatchPrefillWithRaggedKVCacheWrapper = kernels.Wrapper
    return module.FlashInferMLAAttnBackend(runner)


def _triton(runner: Any) -> Any:
    module: Any = importlib.import_module(f"{_ATTENTION}.triton_backend")
    with mock.patch.object(module, "get_device_core_count", return_value=8):
        return module.TritonAttnBackend(runner)


def _trtllm_mha(runner: Any) -> Any:
    """As on SM100; on SM90 and SM120 its prefill calls another kernel."""
    from sglang.srt.runtime_context import override_platform

    _flashinfer_module()
    for name in ("trtllm_mla_backend", "trtllm_mha_backend"):
        importlib.import_module(f"{_ATTENTION}.{name}").flashinfer = kernels.FLASHINFER
    module: Any = importlib.import_module(f"{_ATTENTION}.trtllm_mha_backend")
    with override_platform(is_sm90=False, is_sm100=True, is_sm120=False):
        return module.TRTLLMHAAttnBackend(runner)


BACKENDS: Final[dict[str, Callable[[Any], Any]]] = {
    "fa3": lambda runner: _flash_attention(runner, 3, (9, 0)),
    "fa4": lambda runner: _flash_attention(runner, 4, (10, 0)),
    "flashinfer": lambda runner: _flashinfer_module().FlashInferAttnBackend(runner),
    "flashinfer@mla": _flashinfer_mla,
    "triton": _triton,
    "trtllm_mha": _trtllm_mha,
}
"""How each is made, by its name in SGLang and, behind `@`, what decides between its variants."""


@contextmanager
def ready() -> Iterator[None]:
    """SGLang's process-wide settings as one rank of a plain server has them."""
    from sglang.srt.runtime_context import get_context, get_parallel

    settings = get_context().override_server_args(device="cpu")
    with settings, get_parallel().override(attn_dcp_rank=0), OnCpu():
        yield
